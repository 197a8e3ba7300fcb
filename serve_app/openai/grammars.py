"""The grammar that an answer follows, made of all that a request says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_actor.errors import UnusableGrammar
from engine_actor.options import GrammarKind, GrammarSpec
from engine_actor.sampling.grammars import check_grammar
from serve_app.ingress.errors import ApiError, bad_value
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.protocol import CallingRequest, GenerationRequest
from serve_app.openai.schemas.kept import KeptSchema, kept_schema
from serve_app.openai.structured import Named
from serve_app.openai.tools import ChosenTool, calling_grammar
from serve_app.text.calls import Calls


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """`left_out`: fields of tools that are not strict, which can't be kept to."""

    grammar: GrammarSpec
    left_out: tuple[str, ...] = ()


def has_grammar(body: GenerationRequest) -> bool:
    return bool(body.form) or body.calls is not Calls.NOWHERE


def answer_grammar(body: GenerationRequest, settings: IngressSettings) -> AnswerGrammar | None:
    """None: the answer may be any text. Raises ApiError with what is wrong with a grammar, if anything is. What is
    found out is kept, so another call costs next to nothing."""
    if not has_grammar(body):
        return None
    for name, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise bad_value(name, "the answer's grammar says when it may end, so leave this out")
    form = [_kept_form(named, settings) for named in body.form]
    if body.calls is Calls.NOWHERE:
        return AnswerGrammar(form[0])
    assert isinstance(body, CallingRequest)
    return _calls(body, form, settings)


def _calls(body: CallingRequest, form: Sequence[GrammarSpec], settings: IngressSettings) -> AnswerGrammar:
    schemas: dict[str, str] = {}
    left_out: list[str] = []
    for i, function in enumerate(body.functions):
        param = f"{body.param_of_function(i)}.parameters"
        schema = _kept(param, function.schema_text, settings, lenient=not function.strict)
        schemas[function.name] = schema.text
        left_out += [f"{param}.{place}" if place else param for place in schema.left_out]
    named = isinstance(body.tool_choice, ChosenTool)
    spec = calling_grammar(
        {function.name: schemas[function.name] for function in body.callable_functions},
        must=named or body.tool_choice == "required",
        several=not named and body.parallel_tool_calls is not False,
        text_schema=form[0].data if form else None,
    )
    return AnswerGrammar(spec, tuple(left_out))


def _kept_form(named: Named, settings: IngressSettings) -> GrammarSpec:
    param, form = named
    if form.kind is GrammarKind.JSON_SCHEMA:
        return replace(form, data=_kept(param, form.data, settings, lenient=False).text)
    _check_size(param, form.data, settings)
    try:
        check_grammar(form)
    except UnusableGrammar as error:
        raise _unusable(param, error) from None
    return form


def _kept(param: str, schema: str, settings: IngressSettings, *, lenient: bool) -> KeptSchema:
    _check_size(param, schema, settings)
    try:
        return kept_schema(schema, lenient=lenient, closes=not settings.open_objects)
    except UnusableGrammar as error:
        raise _unusable(param, error) from None


def _check_size(param: str, grammar: str, settings: IngressSettings) -> None:
    size = len(grammar.encode())
    if size > settings.max_grammar_bytes:
        raise bad_value(param, f"a grammar may have at most {settings.max_grammar_bytes} bytes, not {size}")


def _unusable(param: str, error: UnusableGrammar) -> ApiError:
    return bad_value(param, f"no usable {error.kind}: {error.reason}", "invalid_grammar")
