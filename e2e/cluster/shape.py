"""The shape of a cluster: number of workers and node images. A cluster with another shape is never reused."""

from __future__ import annotations

from dataclasses import dataclass

from devtools.progress import as_list

KIND_REPOSITORY = "kindest/node"  # repository of kind's node images


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requested shape. `images` are the accepted node images: names, or a repository for all of its tags."""

    workers: int
    images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Existing:
    """The shape of an existing cluster: role and image of each node as reported by `docker ps`."""

    nodes: tuple[tuple[str, str], ...]

    @property
    def workers(self) -> int:
        return sum(role == "worker" for role, _ in self.nodes)


def parse_nodes(listing: str) -> Existing:
    """Parse `ROLE IMAGE` lines. Docker prints an image's id if its name now belongs to another image."""
    pairs = (line.split(maxsplit=1) for line in listing.splitlines() if line.strip())
    return Existing(tuple((pair[0], pair[1].strip() if len(pair) > 1 else "") for pair in pairs))


def difference(found: Existing, wanted: Wanted) -> str | None:
    """Return the difference to the request as text, or None if there is none."""
    clauses = []
    if found.workers != wanted.workers:
        clauses.append(f"it has {_workers(found.workers)}, {wanted.workers or 'none'} requested")
    others = sorted({image for _, image in found.nodes if not any(_is(image, each) for each in wanted.images)})
    if others:
        clauses.append(f"its nodes run {as_list(others)}, {' or '.join(wanted.images)} requested")
    return "; ".join(clauses) or None


def _workers(count: int) -> str:
    return "no worker" if count == 0 else f"{count} worker{'s' if count > 1 else ''}"


def _is(image: str, wanted: str) -> bool:
    """Return True if `image` is the wanted one; a wanted name without a tag matches its whole repository."""
    if image == wanted:
        return True
    has_tag = ":" in wanted.rpartition("/")[2]
    return not has_tag and image.startswith((f"{wanted}:", f"{wanted}@"))
