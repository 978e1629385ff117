"""pinlaterd: a durable job queue server, compatible with PinLater's Thrift interface.

docs/architecture.md has its processes, its packages, and the way of a call through their files.
"""

__version__ = "0.1.0"
