"""Triton kernels on CPU tensors: the same launchers, in a process whose Triton interprets."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp


class Interpreter:
    """A process with TRITON_INTERPRET=1, which Triton reads when it is first imported.

    Tensors travel as shared memory, so what a kernel writes in place is seen here.
    """

    def __init__(self) -> None:
        context = mp.get_context('spawn')
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        before = os.environ.get('TRITON_INTERPRET')
        os.environ['TRITON_INTERPRET'] = '1'
        try:
            self._process.start()
        finally:
            if before is None:
                del os.environ['TRITON_INTERPRET']
            else:
                os.environ['TRITON_INTERPRET'] = before

    def call(self, function: str, *operands: Any) -> Any:
        """What function `package.module.name` returns in the other process: a tensor, a tuple of them, or nothing."""
        self._connection.send((function, operands))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            return tuple(tensor.clone() for tensor in answer)
        return None if answer is None else answer.clone()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(timeout=10)


@contextmanager
def calling(device: str) -> Iterator[Callable[..., Any]]:
    """Call functions `package.module.name` where their kernels run: here on a GPU, in an interpreter on a CPU."""
    if device == 'cuda':
        yield lambda function, *operands: resolve(function)(*operands)
        return
    interpreter = Interpreter()
    yield interpreter.call
    interpreter.close()


def resolve(function: str) -> Callable[..., Any]:
    """Function `package.module.name`, in this process."""
    module, _, name = function.rpartition('.')
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while (request := connection.recv()) is not None:
        function, operands = request
        try:
            connection.send(resolve(function)(*operands))
        except Exception as error:
            connection.send(error)
