"""Failures that end a command with exit 1, and say what to do."""

from __future__ import annotations


class DeploymentError(Exception):
    """What is wrong with a deployment, and its cure."""
