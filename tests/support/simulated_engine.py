"""Real engines, caches and sessions around a model that only takes its time: many replicas fit on a small machine.

Also a router that sends turns round and round, to compare the sticky one with.
"""

# Without `from __future__ import annotations`: Serve looks at the class that annotates the argument of `build`.

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.serve import Application
from ray.serve.request_router import PendingRequest, RunningReplica

from engine_actor.actor_options import ActorOptions
from engine_actor.decoding.decoder import PackedStep
from engine_actor.manifest import DecoderManifest, PagedState
from engine_actor.memory.layout import PoolGeometry
from serve_app.cluster import app as app_module
from serve_app.cluster.app import assemble
from serve_app.cluster.deployments import EngineDeployment
from serve_app.cluster.routing.sticky_router import ONLY, StickyRouter
from serve_app.config import AppArgs
from serve_app.text.tokenizer import Tokenizer
from tests.support.logits_decoder import HostSampled

if TYPE_CHECKING:
    from engine_actor.actor.actor import DecoderFactory, EngineActor

STEP_SECONDS = 0.008
TOKEN_SECONDS = 0.001
FIRST_WORD, WORDS = 1000, 5000  # ids of ordinary tokens in the demo model's vocabulary


class SimulatedDecoder(HostSampled):
    """Sleeps for a step and for each of its tokens; the next token is a function of the last one and its place."""

    row_invariant = True

    def __init__(self, vocab: int, eos: int) -> None:
        self.manifest = DecoderManifest(vocab, 8192, frozenset({eos}), PagedState((0,), 1, 1, 8))

    def allocate(self, pools: PoolGeometry) -> None:
        pass

    def forward(self, step: PackedStep) -> np.ndarray:
        time.sleep(STEP_SECONDS + TOKEN_SECONDS * len(step.input_ids))
        logits = np.zeros((len(step.logits_rows), self.manifest.vocab_size), np.float32)
        for row, wanted in enumerate(step.logits_rows):
            seen = int(step.input_ids[wanted]) * 31 + int(step.position_ids[wanted]) * 7
            logits[row, FIRST_WORD + seen % WORDS] = 100.0
        return logits

    def read_blocks(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        raise NotImplementedError("its blocks cannot move")

    def write_blocks(self, blocks: Sequence[int], content: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError("its blocks cannot move")


class SimulatedEngine(EngineDeployment):
    def _make_actor(self, options: ActorOptions, tokenizer: Tokenizer, load: "DecoderFactory") -> "EngineActor":
        from engine_actor.decoding.load import LoadedDecoder

        def simulated(options: ActorOptions, progress: Any) -> LoadedDecoder:
            return LoadedDecoder(SimulatedDecoder(tokenizer.vocab_size, eos=2), 2**40)

        return super()._make_actor(options, tokenizer, simulated)


class RoundRobinRouter(StickyRouter):
    """Turn by turn to the next replica, whoever holds the conversation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or pending_request.kwargs.get(ONLY):
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        first = next(self._turns) % max(1, len(ordered))
        return [[replica] for replica in ordered[first:] + ordered[:first]]


def build(args: AppArgs) -> Application:
    return assemble(args, SimulatedEngine)


def build_round_robin(args: AppArgs) -> Application:
    app_module.ROUTER = "tests.support.simulated_engine.RoundRobinRouter"
    return assemble(args, SimulatedEngine)
