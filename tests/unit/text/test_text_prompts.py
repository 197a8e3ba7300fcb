from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.chat_template import ChatTemplate, Message
from serve_app.text.errors import ChatTemplateError
from serve_app.text.prompts import PromptBuilder
from serve_app.text.stream import text_digest
from serve_app.text.tokenizer import Tokenizer
from tests.support.tokenizers import with_template

# SmolLM2 has no token for some control characters; a prompt that holds one has no spans.
CONTENT = st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF), max_size=20)


def chat(*turns: str) -> list[Message]:
    """user, assistant, user, ..."""
    return [Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(turns)]


def spanned(builder: PromptBuilder, messages: list[Message]) -> list[str]:
    prompt = builder.chat(messages)
    texts = [builder.tokenizer.decode(prompt.ids[span.start : span.end]) for span in prompt.spans]
    assert [span.digest for span in prompt.spans] == [text_digest(text) for text in texts]
    return texts


def test_the_models_template_makes_the_prompt(smollm2_prompts: PromptBuilder) -> None:
    prompt = smollm2_prompts.chat(chat("Hi"))
    text = b"".join(smollm2_prompts.tokenizer.token_bytes[i] for i in prompt.ids).decode()
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.spans == ()


def test_every_assistant_message_gets_its_span(smollm2_prompts: PromptBuilder) -> None:
    assert spanned(smollm2_prompts, chat("Hi", "Hello 😀!", "and", " led by a space", "go")) == [
        "Hello 😀!",
        " led by a space",
    ]


def test_a_text_that_stands_elsewhere_too_is_found_in_its_own_place(smollm2_prompts: PromptBuilder) -> None:
    # "helpful" stands in the default system prompt, "user" in every header.
    prompt = smollm2_prompts.chat(chat("helpful", "helpful", "user", "user", "x"))
    ids, decode = prompt.ids, smollm2_prompts.tokenizer.decode
    for span, text in zip(prompt.spans, ["helpful", "user"], strict=True):
        assert decode(ids[span.start : span.end]) == text
        assert decode(ids[: span.start]).endswith("assistant\n")


def test_an_empty_answer_has_no_span_and_does_not_hide_the_others(smollm2_prompts: PromptBuilder) -> None:
    assert spanned(smollm2_prompts, chat("a", "", "b", "yes", "c")) == ["yes"]


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(CONTENT, min_size=1, max_size=7))
def test_spans_hold_exactly_the_answers(smollm2_prompts: PromptBuilder, turns: list[str]) -> None:
    texts = spanned(smollm2_prompts, chat(*turns))
    answers = [text for text in turns[1::2] if text]
    remaining = iter(answers)
    assert all(text in remaining for text in texts)  # in order, and none that is not an answer
    # An answer that begins or ends with line breaks can share a token with the template around it.
    assert len(texts) >= sum(text.strip() == text and text.isalnum() for text in answers)


def test_an_answer_that_shares_a_token_with_its_frame_has_no_span(smollm2: Tokenizer) -> None:
    builder = PromptBuilder(with_template(smollm2, "{% for m in messages %}[{{ m.content }}]{% endfor %}"))
    messages = [Message(role="assistant", content="]"), Message(role="assistant", content="fine")]
    assert spanned(builder, messages) in ([], ["fine"])
    glued = PromptBuilder(with_template(smollm2, "{% for m in messages %}w{{ m.content }}{% endfor %}"))
    assert spanned(glued, [Message(role="assistant", content="ord")]) == []


def test_a_trimmed_answer_has_no_span_but_the_next_one_has(smollm2: Tokenizer) -> None:
    builder = PromptBuilder(
        with_template(smollm2, "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}")
    )
    assert spanned(builder, chat("a", " b ", "c", "d", "e")) == ["d"]


def test_a_template_that_changes_an_answer_gives_no_wrong_span(smollm2: Tokenizer) -> None:
    builder = PromptBuilder(
        with_template(smollm2, "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}")
    )
    assert spanned(builder, chat("a", "b", "c")) == []


def test_a_template_that_drops_old_answers_gives_no_wrong_span(smollm2: Tokenizer) -> None:
    builder = PromptBuilder(with_template(smollm2, "{{ messages[-1].content }}<|im_end|>b"))
    assert spanned(builder, chat("a", "b", "c")) == []


def test_a_template_may_refuse(smollm2: Tokenizer) -> None:
    builder = PromptBuilder(with_template(smollm2, "{{ raise_exception('only users may speak') }}"))
    with pytest.raises(ChatTemplateError, match="only users may speak"):
        builder.chat(chat("a"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_whatever_fails_in_a_template_is_one_typed_error(smollm2: Tokenizer, source: str) -> None:
    with pytest.raises(ChatTemplateError):
        PromptBuilder(with_template(smollm2, source)).chat(chat("a"))


def test_a_model_without_template_can_complete_but_not_chat(sentencepiece: Tokenizer) -> None:
    builder = PromptBuilder(sentencepiece)
    assert len(builder.text("the a").ids) > 0
    with pytest.raises(ChatTemplateError, match="no chat template"):
        builder.chat(chat("a"))


def test_templates_have_what_the_format_promises() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(chat("<é>", "b"))
    assert rendered == '<s>{"role": "user", "content": "<é>"}4True'


def test_what_training_marks_as_generated_stands_in_the_prompt(smollm2: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
        "{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    )
    prompt = PromptBuilder(with_template(smollm2, source)).chat(chat("a", "b", "c"))
    assert smollm2.decode(prompt.ids) == "a?b!c?"


def test_a_template_that_is_none_leaves_completions(smollm2: Tokenizer) -> None:
    builder = PromptBuilder(with_template(smollm2, "{% for m in messages %}"))
    assert builder.text("Once").ids
    with pytest.raises(ChatTemplateError, match=r"can't be compiled.*\. It serves /v1/completions only"):
        builder.chat(chat("Hi"))


def test_the_token_by_which_the_template_ends_an_answer_ends_it(smollm2: Tokenizer) -> None:
    """Though the file names another one as the end of a text."""
    base = with_template(smollm2, smollm2.template, ends=frozenset({0}))
    assert PromptBuilder(base).chat(chat("Hi")).ends == {2}
    assert PromptBuilder(base).chat(chat("Hi", "Hello", "x")).ends == {2}
    assert PromptBuilder(base).text("Hi").ends == PromptBuilder(smollm2).chat(chat("Hi")).ends == frozenset()
    plain = PromptBuilder(with_template(smollm2, "{% for m in messages %}{{ m.content }}\n{% endfor %}"))
    assert plain.chat(chat("Hi")).ends == frozenset()
