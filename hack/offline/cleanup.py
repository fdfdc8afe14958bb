"""Removal of everything that a cluster changed on the machine, except the cache."""

from __future__ import annotations

from devtools.progress import log_line

from . import docker_daemon, host_settings, killed_daemon


def stop_docker_and_restore_host() -> None:
    """Stop the Docker daemon that these tools started, remove what a killed one left, and restore host settings."""
    stopped = docker_daemon.stop()
    if stopped:
        log_line("docker: stopped")
    cleared = killed_daemon.clear()
    host_settings.restore(docker_stopped=stopped or cleared)
