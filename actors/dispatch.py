"""The ingress's way to the router and the workers: leases, token events, outcomes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, RayActorError, RayError

from actors.config import RouterConfig
from actors.engine import EngineUnhealthy
from actors.generation import Generation
from actors.messages import (
    Arrival,
    GenerateRequest,
    Lease,
    Outcome,
    Priority,
    Refusal,
    TokenEvent,
    WorkerGone,
    WorkerLost,
)
from actors.prefix_index import prefix_hashes
from actors.replica import by_value
from actors.sessions import pack, unpack
from actors.stitch import shared_length
from actors.token_stream import Clock, TokenStream

if TYPE_CHECKING:
    from lmdeploy.messages import GenerationConfig
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

_ROUTER_RETRY_S = 0.5


class Dispatcher:
    """Opens token streams and keeps the leases of this ingress alive.

    Args:
        router, workers: Handles of the two deployments.
        owner: Name of this ingress, unique in the deployment.
        config: Deadlines and bounds.
    """

    def __init__(
        self,
        router: DeploymentHandle,
        workers: DeploymentHandle,
        owner: str,
        config: RouterConfig,
        clock: Clock = time.monotonic,
    ) -> None:
        self.clock = clock
        self.max_resumes = config.max_resumes
        self._router = router
        self._leases = by_value(router)
        self._workers = workers.options(stream=True)
        self._owner = owner
        self._timeout_s = config.request_timeout_s
        self._period_s = config.lease_timeout_s / 4
        self._numbers = itertools.count()
        self._held: dict[str, Lease] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.spawn(self._renew_forever())

    async def history(self, session: str) -> list[int]:
        """Return the retained tokens of a named session; none when the router is away, which costs only time."""
        try:
            return unpack(await self._router.history.remote(session))
        except RayActorError as error:
            logger.warning('could not ask the router for a history: %r', error)
            return []

    async def remember(self, session: str, epoch: int, history: Sequence[int]) -> None:
        """Tell the router which tokens the client of a named session has."""
        await self._tell(self._router.remember.remote(session, epoch, pack(history)))

    async def open(
        self,
        input_ids: list[int],
        gen_config: GenerationConfig,
        session: str | None = None,
        history: list[int] | None = None,
        timeout_s: float | None = None,
        priority: Priority = 'normal',
    ) -> TokenStream:
        """Get a request admitted and return its stream once the first token is there.

        Args:
            session: The client's name for its session; None makes the request one of its own.
            history: The session's retained tokens.
            timeout_s: A deadline before the usual one.

        Raises:
            RequestError: It was refused or failed.
        """
        request_id = f'{self._owner}-{next(self._numbers)}'
        arrival = Arrival(
            request_id,
            self._owner,
            session or request_id,
            min(timeout_s or self._timeout_s, self._timeout_s),
            named=session is not None,
            priority=priority,
            prompt_tokens=len(input_ids),
            max_new_tokens=gen_config.max_new_tokens,
            common_tokens=shared_length(input_ids, history or []),
            prefixes=prefix_hashes(input_ids),
        )
        stream = TokenStream(self, arrival, Generation(input_ids, gen_config))
        await stream.opened()
        return stream

    async def admit(self, arrival: Arrival) -> Lease | Refusal:
        """Wait for the router's decision; a router that dies meanwhile is asked again when it is back."""
        while True:
            response = self._leases.admit.remote(arrival)
            try:
                decision: Lease | Refusal = await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            except RayActorError:
                await asyncio.sleep(_ROUTER_RETRY_S)
                continue
            if isinstance(decision, Lease):
                self._held[decision.request_id] = decision
            return decision

    async def run(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield a worker's token events; leaving early aborts the request there.

        Raises:
            WorkerLost: The worker will not finish it; the router knows, and the lease is given back.
        """
        response = self._workers.generate.remote(request)
        try:
            async for event in response:
                yield event
        except WorkerGone as error:
            await self._lose(request)
            raise WorkerLost('worker_gone', str(error)) from error
        except EngineUnhealthy as error:
            await self.suspect(request)
            raise WorkerLost('engine_failed', str(error)) from error
        except ActorDiedError as error:
            await self._lose(request)
            raise WorkerLost('worker_died', type(error).__name__) from error
        except RayError as error:
            await self.suspect(request)
            raise WorkerLost('engine_failed', type(error).__name__) from error
        except BaseException:
            response.cancel()
            raise

    async def release(self, request: GenerateRequest) -> None:
        """Give back the lease of a request that its worker has put out, of which the worker tells the router itself."""
        await self._give_back(request, self._leases.release.remote(request.request_id))

    async def suspect(self, request: GenerateRequest) -> None:
        """Give back the lease of a request that its engine failed, and warn the router of the worker."""
        await self._give_back(request, self._leases.suspect.remote(request.worker_id, request.request_id))

    def finish(self, outcome: Outcome) -> None:
        """Tell the router that a request has ended."""
        self._held.pop(outcome.request_id, None)
        self.spawn(self._tell(self._leases.finish.remote(outcome)))

    async def _lose(self, request: GenerateRequest) -> None:
        await self._give_back(request, self._leases.lose.remote(request.worker_id, request.request_id))

    async def _give_back(self, request: GenerateRequest, response: Any) -> None:
        self._held.pop(request.request_id, None)
        await self._tell(response)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background to its end."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._tell(self._leases.renew.remote(self._owner, list(self._held.values())))

    async def _tell(self, response: Any) -> None:
        try:
            await response
        except Exception as error:
            # The router restarts on its own and learns of our leases from the next renewal.
            logger.warning('could not reach the router: %r', error)
