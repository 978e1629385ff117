"""The service that `pinlater-admin` is tried on."""

from tests.shared_service import client, queue, service

__all__ = ["client", "queue", "service"]
