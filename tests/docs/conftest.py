"""The service that the documentation's examples are run against."""

from tests.shared_service import service

__all__ = ["service"]
