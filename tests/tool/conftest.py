"""The service that `pinlater` is tried on."""

from tests.shared_service import client, queue, service

__all__ = ["client", "queue", "service"]
