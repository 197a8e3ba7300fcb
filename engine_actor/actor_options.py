"""What an EngineActor is started with: the model, its memory, the limits of its engine and of its queues."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.errors import InvalidOption
from engine_actor.limits import EngineLimits
from engine_actor.options import require_integer, require_number


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Plain values, so that they cross a process border.

    model                 a Hugging Face folder or a GGUF file
    dtype                 of the KV cache and of expanded weights: "bfloat16" or "float32"
    weights               quantized matrices stay "stored" as the file has them, or are "expanded" to dtype; "auto":
                          stored where that can run
    device                "auto" (CUDA where there is one), "cpu" or "cuda"
    limits                of the engine's steps, memory and order
    kv_memory             the KV pool: bytes if > 1, else the share of the memory that is free at start
    max_model_len         longest sequence; None: the model's own context
    max_sessions          resident sessions, running or dormant
    session_ttl_seconds   a session idle for longer is dropped from memory; 0: never
    max_running_sequences choices of all turns that run at a time; None: max_batch_size, so that all are in every step
    max_queued_turns      turns that wait; more are refused with QUEUE_FULL. None: three for each of those that run
    max_turns_per_session turns of one session, the running one included; more are refused with SESSION_BUSY
    max_step_seconds      a step that takes longer means that the engine hangs: the health check fails. Once its pace is
                          known, less does (`StepBound`)
    threads               of the math libraries; 0: all cores of this machine
    """

    model: str
    dtype: str = "bfloat16"
    weights: str = "auto"
    device: str = "auto"
    backend: str = "torch"
    limits: EngineLimits = field(default_factory=EngineLimits)
    kv_memory: float = 0.3
    max_model_len: int | None = None
    max_sessions: int = 256
    session_ttl_seconds: float = 3600.0
    max_running_sequences: int | None = None
    max_queued_turns: int | None = None
    max_turns_per_session: int = 8
    max_step_seconds: float = 300.0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise InvalidOption("dtype", self.dtype, "'bfloat16' or 'float32'")
        if self.weights not in ("auto", "stored", "expanded"):
            raise InvalidOption("weights", self.weights, "'auto', 'stored' or 'expanded'")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidOption("device", self.device, "'auto', 'cpu' or 'cuda'")
        if self.backend != "torch":
            raise InvalidOption("backend", self.backend, "'torch'")
        require_number("kv_memory", self.kv_memory, 1e-6, 2.0**50)
        require_number("max_step_seconds", self.max_step_seconds, 1.0, 1e6)
        require_number("session_ttl_seconds", self.session_ttl_seconds, 0.0, 1e9)
        for name in ("max_sessions", "max_turns_per_session"):
            require_integer(name, getattr(self, name), 1)
        for name in ("max_running_sequences", "max_queued_turns"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 1)
        require_integer("threads", self.threads, 0, 1024)

    @property
    def running_limit(self) -> int:
        return self.limits.max_batch_size if self.max_running_sequences is None else self.max_running_sequences

    @property
    def queue_limit(self) -> int:
        return 3 * self.running_limit if self.max_queued_turns is None else self.max_queued_turns
