"""Administrators' routes: put workers to sleep, wake them up, give them other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from actors.messages import Change, Changed, WorkerReport

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class WakeupBody(BaseModel):
    """Of `/admin/wakeup`."""

    model_config = ConfigDict(extra='forbid')

    worker_id: str | None = Field(default=None, description='One worker; None: all.')


class SleepBody(WakeupBody):
    """Of `/admin/sleep`."""

    level: Literal[1, 2] = Field(default=1, description="1 keeps the weights in the host's memory, 2 drops them.")
    timeout_s: Seconds = Field(default=60.0, description='How long running requests may go on.')


class ReloadBody(WakeupBody):
    """Of `/admin/reload`."""

    path: str | None = Field(default=None, description='Checkpoint folder; None: the present one, read again.')
    timeout_s: Seconds = Field(default=60.0, description='How long running requests may go on.')


class Admin:
    """Brings changes to the workers.

    Args:
        router, workers: Handles of the two deployments.
    """

    def __init__(self, router: DeploymentHandle, workers: DeploymentHandle) -> None:
        self._router = router
        self._workers = workers

    def routes(self) -> APIRouter:
        """Return the routes; who may call them is for the caller to say."""
        routes = APIRouter(prefix='/admin')

        @routes.post('/sleep')
        async def sleep(body: SleepBody) -> JSONResponse:
            """Free the workers' memory; all at once."""
            ids = await self._ids(body.worker_id)
            changes = [Change(worker_id, 'sleep', body.timeout_s, level=body.level) for worker_id in ids]
            return answer(await asyncio.gather(*map(self._change, changes)))

        @routes.post('/wakeup')
        async def wakeup(body: WakeupBody) -> JSONResponse:
            """End a sleep; all at once."""
            changes = [Change(worker_id, 'wakeup', 0.0) for worker_id in await self._ids(body.worker_id)]
            return answer(await asyncio.gather(*map(self._change, changes)))

        @routes.post('/reload')
        async def reload(body: ReloadBody) -> JSONResponse:
            """Read weights again, one worker after another so that the rest serve; the first trouble ends it."""
            done: list[Changed] = []
            ids = await self._ids(body.worker_id)
            for worker_id in ids:
                if done and done[-1].outcome != 'done':
                    break
                done.append(await self._change(Change(worker_id, 'reload', body.timeout_s, path=body.path)))
            return answer(done, untouched=ids[len(done) :])

        return routes

    async def _ids(self, worker_id: str | None) -> list[str]:
        reports: tuple[WorkerReport, ...] = await self._router.workers.remote()
        ids = sorted(report.worker_id for report in reports)
        if worker_id is None:
            return ids
        if worker_id not in ids:
            known = ', '.join(ids) or 'none'
            raise HTTPException(HTTPStatus.NOT_FOUND, f'worker_id: got {worker_id!r}; there is {known}')
        return [worker_id]

    async def _change(self, change: Change) -> Changed:
        try:
            changed: Changed = await self._workers.change.remote(change)
        except Exception as error:
            return Changed(change.worker_id, 'failed', 'failed', 0, message=f'{type(error).__name__}: {error}')
        return changed


def answer(changed: Sequence[Changed], untouched: Sequence[str] = ()) -> JSONResponse:
    """Return what became of every worker: 200 all done, 207 some, 409 all refused, 502 none done, 503 no worker.

    Args:
        untouched: Workers that were left out after trouble with one before them.
    """
    outcomes = {one.outcome for one in changed}
    if outcomes == {'done'}:
        status = HTTPStatus.OK
    elif 'done' in outcomes:
        status = HTTPStatus.MULTI_STATUS
    elif not outcomes:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    else:
        status = HTTPStatus.CONFLICT if outcomes == {'refused'} else HTTPStatus.BAD_GATEWAY
    body: dict[str, Any] = {'workers': [asdict(one) for one in changed], 'untouched': list(untouched)}
    return JSONResponse(body, status)
