"""The typed form of a deployment's `args`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from actors.config_error import ConfigError, explain
from replayssm.config import MAX_BUFFER_LEN, MIN_BUFFER_LEN, ReplayConfig, StateDtype
from replayssm.patch import Fixes, Settings

Device = Literal['cpu', 'cuda']
Dtype = Literal['auto', 'float32', 'float16', 'bfloat16']
DemoModel = Literal['small', 'tiny', 'odd', 'tp4', 'moe', 'glm', 'glm_odd']
PositiveSeconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]


def _absolute(path: str) -> str:
    if not PurePath(path).is_absolute():
        raise ValueError('use an absolute path: replicas have working directories of their own')
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class _Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra='forbid', frozen=True, validate_default=True)


class ModelConfig(_Section):
    """Which checkpoint to serve, and under which name."""

    name: str = Field(min_length=1, description='Name that clients pass as `model`.')
    path: str | None = Field(default=None, description='Directory or hub id of a checkpoint.')
    demo: DemoModel | None = Field(
        default=None,
        description='A model of the project: `small` is trained; the others are random, made on first use.',
    )
    trust_remote_code: bool = Field(default=False, description='Run Python code that comes with the checkpoint.')
    random_weights: bool = Field(
        default=False,
        description='For benchmarks only: draw weights at random; `path` then needs config.json and tokenizer alone.',
    )

    @model_validator(mode='after')
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.demo is None):
            raise ValueError(f'got path={self.path!r} and demo={self.demo!r}; set exactly one of them')
        return self


class SpeculativeConfig(_Section):
    """Drafts by the model's own multi-token-prediction layer."""

    method: Literal['qwen3_5_mtp', 'deepseek_mtp'] = Field(
        default='qwen3_5_mtp',
        description="LMDeploy's name of the method: `qwen3_5_mtp` for Qwen3.5, `deepseek_mtp` for GLM-5.3-Flash.",
    )
    num_tokens: int = Field(default=3, ge=1, le=7, description='Drafts per step.')
    accepted: tuple[Share, ...] | None = Field(
        default=None,
        description='For benchmarks only: shares of steps that accept 0, 1, 2, … drafts, whatever the model says.',
    )

    @model_validator(mode='after')
    def _one_share_per_outcome(self) -> SpeculativeConfig:
        if self.accepted is not None and (len(self.accepted) != self.num_tokens + 1 or not sum(self.accepted)):
            raise ValueError(f'accepted: got {self.accepted}; give {self.num_tokens + 1} shares, not all zero')
        return self


class ReplayOptions(_Section):
    """ReplaySSM: see `replayssm.config.ReplayConfig`."""

    enabled: bool = Field(default=True, description='False keeps whole states, as LMDeploy does.')
    buffer_len: int = Field(
        default=16,
        ge=MIN_BUFFER_LEN,
        le=MAX_BUFFER_LEN,
        description='Committed records over a checkpoint; at least 1 + `speculative.num_tokens`.',
    )
    checkpoint_dtype: StateDtype = Field(default='float32', description='Of checkpoint states.')
    record_dtype: StateDtype = Field(default='float32', description="Of the records' delta vectors.")


class FixesOptions(_Section):
    """Corrections of LMDeploy's engine: see `replayssm.patch.Fixes`."""

    continuation: bool = Field(default=True, description='Recompute private state that ran ahead of its history.')
    mrope: bool = Field(default=True, description='Keep MRoPE positions in step with token ids.')
    conv_tail: bool = Field(default=True, description='Save the right convolution state after short chunks.')
    ray_free: bool = Field(default=True, description="Release every forward's inputs in Ray's object store.")
    window_attention: bool = Field(default=True, description='Verify drafts on CUDA without FlashAttention-3.')
    fresh_state: bool = Field(default=True, description='Start sequences from zero states on CUDA, not from a gate.')
    sleep: bool = Field(default=True, description='Leave nothing of before a sleep to the time after it.')


class EngineConfig(_Section):
    """One engine, that is one tensor-parallel group. Names are LMDeploy's where LMDeploy has the option."""

    device: Device = Field(default='cuda', description='What the engine runs on.')
    tp: int = Field(default=1, ge=1, description='Ranks of the tensor-parallel group.')
    dtype: Dtype = Field(default='auto', description="Of weights and activations; `auto`: the checkpoint's.")
    session_len: int | None = Field(default=None, ge=16, description='Prompt and output tokens; None: the model says.')
    max_batch_size: int = Field(default=32, ge=1, description='Sequences that run at once.')
    num_gpu_blocks: int = Field(default=0, ge=0, description='KV-cache blocks; 0 fills `cache_max_entry_count`.')
    block_size: int = Field(default=64, ge=16, description='Tokens per KV-cache block.')
    max_prefill_token_num: int = Field(default=8192, ge=1, description='Tokens of one prefill step.')
    cache_max_entry_count: float = Field(default=0.8, gt=0, lt=1, description='Share of free memory for caches.')
    enable_prefix_caching: bool = Field(default=False, description='Reuse the KV and states of common prefixes.')
    prefix_cache_state_budget: int = Field(default=0, ge=0, description='State slots kept for prefix hits.')
    eager_mode: bool = Field(default=False, description='No CUDA graphs; always so on device cpu.')
    cpu_threads: int = Field(default=1, ge=1, description='Torch threads per rank on device cpu.')
    logprobs: bool = Field(default=True, description='Let requests ask for log-probabilities.')
    log_level: Literal['DEBUG', 'INFO', 'WARNING', 'ERROR'] = Field(default='WARNING', description="LMDeploy's logger.")
    speculative: SpeculativeConfig | None = Field(default=None, description='None: no speculative decoding.')
    replay: ReplayOptions = ReplayOptions()
    fixes: FixesOptions = FixesOptions()

    @model_validator(mode='after')
    def _consistent(self) -> EngineConfig:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f'block_size is {self.block_size}; use a power of two such as 64')
        if self.device == 'cpu' and self.num_gpu_blocks == 0:
            raise ValueError('num_gpu_blocks is 0 on device cpu, which has no free memory to fill; use 256, say')
        if self.device == 'cuda' and self.dtype == 'float32':
            raise ValueError("dtype is 'float32' on device cuda; use 'auto', 'bfloat16' or 'float16'")
        window = 1 + (self.speculative.num_tokens if self.speculative else 0)
        if self.replay.enabled and self.replay.buffer_len < window:
            raise ValueError(f'replay.buffer_len is {self.replay.buffer_len}; verifying {window} tokens needs {window}')
        self.patch_settings()
        return self

    def patch_settings(self) -> Settings:
        """Return what `replayssm.patch.enable` takes; it checks how the options go together."""
        options = self.replay
        replay = ReplayConfig(options.buffer_len, options.checkpoint_dtype, options.record_dtype)
        accepted = (self.speculative and self.speculative.accepted) or ()
        fixes = Fixes(**self.fixes.model_dump())
        return Settings(replay if options.enabled else None, fixes, accepted_drafts=accepted)


class AutoscalingOptions(_Section):
    """How many workers there are, by the router's pressure: running and waiting requests over what workers may run."""

    min_replicas: int = Field(default=1, ge=1, description='Workers at the least, and at the start.')
    max_replicas: int = Field(ge=1, description='Workers at the most.')
    target_pressure: float = Field(default=0.7, gt=0, description='Share of the capacity to be in use.')
    upscale_delay_s: PositiveSeconds = Field(default=30.0, description='Pressure above target before a start.')
    downscale_delay_s: PositiveSeconds = Field(default=600.0, description='Pressure below target before a stop.')

    @model_validator(mode='after')
    def _ordered(self) -> AutoscalingOptions:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f'max_replicas is {self.max_replicas}; give at least min_replicas={self.min_replicas}')
        return self


class WorkerConfig(_Section):
    """Replicas of the engine and how Serve looks after them."""

    replicas: int = Field(default=1, ge=1, description='Engines, each a tensor-parallel group of its own.')
    autoscaling: AutoscalingOptions | None = Field(default=None, description='None: always `replicas`.')
    num_cpus: float = Field(default=1, gt=0, description='CPUs of the replica itself, its ranks come on top.')
    wait_for_model: bool = Field(default=False, description='A replica counts as started once its model is loaded.')
    report_period_s: PositiveSeconds = Field(default=1.0, description='Time between two reports to the router.')
    health_check_period_s: PositiveSeconds = Field(default=5.0, description="Time between two of Serve's checks.")
    health_check_timeout_s: PositiveSeconds = Field(default=30.0, description='How long one check may take.')
    stall_timeout_s: PositiveSeconds = Field(default=60.0, description='A batch that stands still for longer is stuck.')
    drain_timeout_s: PositiveSeconds = Field(default=60.0, description='How long a stop waits for running requests.')
    stream_period_s: float = Field(
        default=0.03, ge=0, description='Least time between two token events of one request.'
    )

    @model_validator(mode='after')
    def _one_number_of_replicas(self) -> WorkerConfig:
        if self.autoscaling is not None and 'replicas' in self.model_fields_set:
            raise ValueError(f'replicas is {self.replicas} beside autoscaling; leave one of them out')
        return self

    @property
    def max_replicas(self) -> int:
        """Engines that there may be at once."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas


class RouterConfig(_Section):
    """Admission."""

    max_running: int | None = Field(default=None, ge=1, description='Per worker; None: engine.max_batch_size.')
    max_queued: int = Field(default=64, ge=0, description='Requests that wait for a worker, all sessions together.')
    max_queued_tokens: int | None = Field(default=None, ge=1, description='Prompt tokens that wait; None: no limit.')
    max_kv_share: float | None = Field(
        default=1.0,
        gt=0,
        description="A worker's requests, by predicted tokens, over its KV blocks; None: no limit.",
    )
    home_queue: int = Field(default=4, ge=0, description='Requests that may wait for one worker that has their state.')
    home_wait_s: float = Field(default=1.0, ge=0, description='How long they wait before another worker may have them.')
    max_resumes: int = Field(default=3, ge=0, description='Times that a request goes on after its worker has died.')
    resume_wait_s: float = Field(
        default=60.0, ge=0, description='How long such a request waits when no worker is ready.'
    )
    max_sessions: int = Field(default=100_000, ge=1, description='Named sessions that are remembered.')
    max_session_tokens: int = Field(default=50_000_000, ge=1, description='Tokens of their histories, 4 bytes each.')
    session_ttl_s: PositiveSeconds = Field(default=3600.0, description='Silence after which a session is forgotten.')
    request_timeout_s: PositiveSeconds = Field(
        default=600.0, description='Deadline, counted from the arrival; clients may ask for an earlier one.'
    )
    lease_timeout_s: PositiveSeconds = Field(default=15.0, description='Silence that costs an ingress its leases.')
    worker_timeout_s: PositiveSeconds = Field(
        default=10.0, description='Silence after which a worker gets no requests.'
    )


class ApiConfig(_Section):
    """The HTTP ingress. Parsers are LMDeploy's, by name."""

    replicas: int = Field(default=1, ge=1, description='Ingress processes.')
    num_cpus: float = Field(default=0.5, gt=0, description='CPUs of one ingress.')
    reasoning_parser: str | None = Field(default=None, description='Takes reasoning out of the text.')
    tool_call_parser: str | None = Field(default=None, description='Takes tool calls out of the text.')
    generation_config: str = Field(default='auto', description="Sampling defaults: 'auto', 'lmdeploy' or a directory.")
    allow_origins: tuple[str, ...] = Field(default=(), description='Origins that CORS admits; none: no CORS headers.')
    api_keys_file: AbsolutePath | None = Field(
        default=None,
        description='File with one API key per line, read again when it changes; None: everybody may call.',
    )
    admin_token_file: AbsolutePath | None = Field(
        default=None, description="File with the administrators' token; None: there are no routes under `/admin/`."
    )
    max_body_bytes: int = Field(default=16 << 20, ge=1024, description='Of a request; a larger one gets 413.')
    max_header_bytes: int = Field(
        default=32 << 10, ge=1024, description='Of all headers of a request together; larger ones get 431.'
    )


class MetricsConfig(_Section):
    """The exporter, which runs beside the router."""

    host: str = Field(default='127.0.0.1', description='Address to listen at; `0.0.0.0` for other machines.')
    port: int | None = Field(default=9401, ge=1, le=65535, description='None: no exporter.')


class PlacementConfig(_Section):
    """Where replicas may go."""

    wait_for_nodes: bool = Field(default=False, description='True where a cluster autoscaler adds missing nodes.')


class AppConfig(_Section):
    """Everything that `args` of a Serve application may hold."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    worker: WorkerConfig = WorkerConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    placement: PlacementConfig = PlacementConfig()

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> AppConfig:
        """Build the configuration from `args`; Serve calls this too.

        Raises:
            ConfigError: instead of pydantic's ValidationError.
        """
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from None

    @property
    def worker_capacity(self) -> int:
        """Requests that one worker may run at once."""
        return self.router.max_running or self.engine.max_batch_size
