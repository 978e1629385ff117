"""The service that `pinlater` is tried on."""

from tests.shared_service import client, queue, service
from tests.tool.program import run

__all__ = ["client", "queue", "run", "service"]
