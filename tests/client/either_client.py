"""Client and AsyncClient behind one face, so that a test of what both promise is written once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

import pytest

from pinlaterd.client import AsyncClient, Client, JobRecord


class BlockingAsyncClient:
    """An AsyncClient on a loop of its own, whose coroutines are waited for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = AsyncClient(*arguments, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return (lambda *a, **k: self._wait(found(*a, **k))) if callable(found) else found

    def scan(self, *arguments: Any, **options: Any) -> list[JobRecord]:
        async def collect() -> list[JobRecord]:
            return [record async for record in self._client.scan(*arguments, **options)]

        return list(self._wait(collect()))

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@pytest.fixture(params=[Client, BlockingAsyncClient], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Any:
    """Makes clients, of the one kind and then of the other; the arguments are those of both."""
    return request.param
