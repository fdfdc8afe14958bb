"""The shape in which Kubernetes objects travel through the operator: plain JSON values, never written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Manifest = Mapping[str, Any]
