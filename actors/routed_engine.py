"""LMDeploy's `AsyncEngine` without an engine: its HTTP routes prepare requests here and workers run them.

Chat template, tokenizer and detokenisation belong to the ingress: workers keep their interpreter for the engine, and
the ingress holds the token history of a request when its worker dies.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from lmdeploy.messages import GenerationConfig, PytorchEngineConfig
from lmdeploy.serve.core import AsyncEngine, PreprocessedRequest, RequestError
from lmdeploy.serve.core.async_engine import GenOut
from lmdeploy.serve.managers import Session
from lmdeploy.serve.openai.api_server import ServerContext
from lmdeploy.utils import get_logger

from actors.config import AppConfig
from actors.dispatch import Dispatcher
from actors.engine_build import model_path
from actors.messages import Priority
from actors.request_checks import check_messages, check_prompt, check_text
from actors.request_log import SilentRequestLogger
from actors.stitch import stitch
from actors.text import TextStream
from actors.token_stream import TokenStream

_FIRST_SESSION_ID = 1 << 62


@dataclass(slots=True)
class RequestScope:
    """What belongs to one HTTP request.

    Attributes:
        session: The client's name for its session, None for a request without one.
        timeout_s: The client's own deadline.
        priority: Whom the queue lets go first.
        streaming: Whether the answer leaves piece by piece, known when it begins to.
        streams: Everything it has opened; closed when the HTTP request ends, however it ends.
        error: The failure that LMDeploy's routes were told of.
    """

    session: str | None = None
    timeout_s: float | None = None
    priority: Priority = 'normal'
    streaming: bool = False
    streams: list[TokenStream] = field(default_factory=list)
    error: RequestError | None = None


request_scope: ContextVar[RequestScope] = ContextVar('request_scope')


@dataclass(slots=True)
class RoutedRequest(PreprocessedRequest):
    """A prepared request that is already running."""

    stream: TokenStream | None = None


@dataclass(slots=True)
class _NoEngine:
    """Stands where `AsyncEngine` keeps its engine."""

    engine_config: PytorchEngineConfig

    def create_instance(self) -> None:
        """There is nothing to hand out: requests go through the dispatcher."""

    def close(self) -> None:
        """There is nothing to close."""


class RoutedEngine(AsyncEngine):
    """Prepares requests, gets them admitted, and turns their tokens into text."""

    def __init__(self, config: AppConfig, dispatcher: Dispatcher) -> None:
        get_logger('lmdeploy').setLevel(config.engine.log_level)
        self._dispatcher = dispatcher
        engine_config = PytorchEngineConfig(
            session_len=config.engine.session_len,
            max_batch_size=1,
            enable_prefix_caching=config.engine.enable_prefix_caching,
            logprobs_mode='raw_logprobs' if config.engine.logprobs else None,
            enable_metrics=False,
        )
        super().__init__(
            model_path(config.model),
            model_name=config.model.name,
            backend='pytorch',
            backend_config=engine_config,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.request_logger = SilentRequestLogger()
        check_messages(self.chat_template)
        self._vocab_size = self.hf_cfg.get_text_config().vocab_size
        # LMDeploy's routes mistake a client's session id for one of these when they are equal.
        self.session_mgr.session_id_generator = itertools.count(_FIRST_SESSION_ID)

    def _build_pytorch(self, *_: Any, backend_config: PytorchEngineConfig, **__: Any) -> _NoEngine:
        return _NoEngine(backend_config)

    def _determine_gen_config(
        self, input_ids: list[int], gen_config: GenerationConfig | None = None
    ) -> GenerationConfig:
        # Stop strings are matched in the text; as token ids they would be incomplete and swallow text.
        gen_config = gen_config or GenerationConfig()
        resolved: GenerationConfig = super()._determine_gen_config(input_ids, replace(gen_config, stop_words=None))
        # All tokens are no restriction; more than there are end the engine.
        return replace(resolved, stop_words=gen_config.stop_words, top_k=min(resolved.top_k, self._vocab_size))

    async def preprocess(self, messages: Any, *args: Any, **kwargs: Any) -> RoutedRequest:
        """Prepare a request, have it admitted and wait for its first token.

        LMDeploy's routes turn an error here into a status of its own, and one in `generate` into an event of a
        stream that has begun with 200. So everything that can be known before the first token is known here.

        Raises:
            RequestError: The request is not valid, was refused, or failed before its first token.
        """
        scope = request_scope.get()
        try:
            check_text(messages)
            prepared = await super().preprocess(messages, *args, **kwargs)
            try:
                check_prompt(prepared.inputs['input_ids'], self._vocab_size)
                stream = await self._open(prepared, scope)
            except BaseException:
                self.session_mgr.remove(prepared.session)
                raise
        except RequestError as error:
            scope.error = error
            raise
        scope.streams.append(stream)
        return RoutedRequest(
            prepared.session,
            prepared.inputs,
            len(prepared.inputs['input_ids']),
            prepared.gen_config,
            prepared.adapter_name,
            stream=stream,
        )

    async def _open(self, prepared: PreprocessedRequest, scope: RequestScope) -> TokenStream:
        """Have a request admitted, as a continuation of its session if it has one."""
        history: list[int] = []
        if scope.session is not None:
            history = await self._dispatcher.history(scope.session)
            prepared.inputs['input_ids'] = self._continue(prepared.inputs, history)
        return await self._dispatcher.open(
            prepared.inputs['input_ids'],
            prepared.gen_config,
            scope.session,
            history,
            scope.timeout_s,
            scope.priority,
        )

    def _continue(self, inputs: dict[str, Any], history: list[int]) -> list[int]:
        """Return the prompt's tokens, as many as possible of them those that the session's history has."""
        text, token_ids = inputs.get('prompt'), inputs['input_ids']
        if not history or not isinstance(text, str):
            return token_ids
        stitched = stitch(text, token_ids, history, self._decode, self._encode)
        return stitched if len(stitched) < self.session_len else token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_bos=False))

    async def generate(self, request: RoutedRequest, stream_response: bool = True) -> AsyncGenerator[GenOut, None]:
        """Yield the text of a running request.

        Raises:
            RequestError: It failed midway.
        """
        assert request.stream is not None
        scope = request_scope.get()
        text = TextStream(self.tokenizer, request.inputs['input_ids'], request.gen_config)
        generated, ended = 0, False
        try:
            async for event in request.stream:
                delta = text.feed(event)
                generated += len(delta.token_ids)
                ended = delta.finish_reason is not None
                if delta.finish_reason is not None:
                    request.stream.close(delta.finish_reason)
                    # Before the client can know that this answer has ended, and ask on.
                    await request.stream.keep(text.shown_tokens)
                yield GenOut(
                    delta.text,
                    request.input_token_len,
                    generated,
                    delta.finish_reason,
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                    cached_tokens=event.cached_tokens,
                )
                if ended:
                    return
        finally:
            request.stream.close()
            if not ended:
                request.stream.keep_soon(text.shown_tokens if scope.streaming else 0)
            self.session_mgr.remove(request.session)


class RoutedContext(ServerContext):
    """What LMDeploy's routes share."""

    def create_session(self, user_session_id: int | None = None) -> Session:
        """Give every request a session of its own inside; the client's own one is the router's business."""
        return super().create_session()
