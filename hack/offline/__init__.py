"""Fallbacks for machines without Docker or without an image registry, used only there.

They start a Docker daemon, install or unpack Debian packages, and build Kubernetes and kind's node image from Debian
packages. Machines that can pull images never run this code.
"""
