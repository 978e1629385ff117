"""A running service, whose figures the tests read."""

from __future__ import annotations

from tests.shared_service import client, queue, service

__all__ = ["client", "queue", "service"]
