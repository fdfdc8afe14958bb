"""Type of Kubernetes objects in the operator: read-only plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Manifest = Mapping[str, Any]
