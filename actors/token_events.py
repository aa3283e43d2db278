"""LMDeploy's outputs as token events."""

from __future__ import annotations

from typing import Any

from actors.messages import FinishReason, TokenEvent


def token_event(output: Any, stop_ids: tuple[int, ...], keep_stop: bool) -> TokenEvent:
    """Convert LMDeploy's `EngineOutput`.

    Args:
        stop_ids: Tokens that end a request with the reason 'stop'.
        keep_stop: Whether that token belongs to the answer.
    """
    token_ids, logprobs = output.token_ids, output.logprobs
    finish_reason: FinishReason | None = None
    error = None
    status = output.status.name
    if status == 'FINISH':
        stopped = bool(token_ids) and token_ids[-1] in stop_ids
        finish_reason = 'stop' if stopped else 'length'
        if stopped and not keep_stop:
            token_ids, logprobs = token_ids[:-1], logprobs and logprobs[:-1]
    elif status == 'CANCEL':
        finish_reason = 'abort'
    elif status != 'SUCCESS':
        finish_reason, error = 'error', status
    cached = output.req_metrics.cached_tokens if output.req_metrics is not None else 0
    return TokenEvent(token_ids, logprobs, finish_reason, cached, error)
