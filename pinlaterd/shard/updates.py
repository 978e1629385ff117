"""What the coordinator tells a shard: that another configuration is active."""

from __future__ import annotations

import logging

from pinlaterd import log as logs
from pinlaterd.config.active import read_active
from pinlaterd.config.layout import CONFIG_FILE, shard_program
from pinlaterd.errors import ConfigError
from pinlaterd.shard.service import ShardService
from pinlaterd.wire.control import ControlClient
from pinlaterd.wire.envelope import MalformedEnvelope

log = logging.getLogger(__name__)


class ConfigUpdates:
    """Takes snapshots from `control` and has `service` follow the active configuration."""

    def __init__(self, control: ControlClient, service: ShardService) -> None:
        self._control = control
        self._service = service

    def hear(self) -> bool:
        """Take what has come, which shows us to a new coordinator. Whether what is followed has
        changed."""
        try:
            snapshot = self._control.receive()
        except MalformedEnvelope:
            log.error("the coordinator sent a message that can't be read; ignored")
            return False
        if snapshot is None or snapshot.config_version == self._control.config_version:
            return False
        return self._read()

    def _read(self) -> bool:
        try:
            in_force = read_active()
        except ConfigError as error:
            log.error("%s", error)
            return False
        if in_force is None:
            log.error("%s can't be read; keeping the last configuration", CONFIG_FILE)
            return False
        logs.set_up(shard_program(self._service.name), in_force.config.server.log_level)
        self._service.follow(in_force.config)
        self._control.config_version = in_force.version
        return True
