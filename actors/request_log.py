"""What LMDeploy writes to its log about requests: nothing that clients sent or got."""

from __future__ import annotations

from typing import Any

from lmdeploy.logger import RequestLogger


class SilentRequestLogger(RequestLogger):
    """In the place of LMDeploy's, which writes prompts, stop strings and answers at levels below INFO."""

    def __init__(self) -> None:
        super().__init__(max_log_len=0)

    def log_prompt(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def log_inputs(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def log_response(self, *_: Any, **__: Any) -> None:
        """Write nothing."""
