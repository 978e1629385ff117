"""Samples of a service's figures, from its coordinator."""

from __future__ import annotations

import time

from pinlaterd.admin import stats_page, target
from pinlaterd.admin.frames import Sample


def take() -> Sample:
    """Raises ConnectionFailed."""
    directory, url = target.directory(), target.stats_url()
    status = stats_page.fetch_json("/status.json", directory=directory, url=url)
    stats = stats_page.fetch_json("/snapshot.json", directory=directory, url=url)
    return Sample(time.monotonic(), status, stats)
