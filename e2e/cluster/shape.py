"""The shape of a cluster: how many workers it has and what its nodes run. One of another shape is never reused."""

from __future__ import annotations

from dataclasses import dataclass

from devtools.progress import as_list

KIND_REPOSITORY = "kindest/node"  # where kind's own node images come from, whatever the version


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. `images` are the node images that will do: names, or a repository for all of its tags."""

    workers: int
    images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a cluster has: the role and the image of each node, as `docker ps` says them."""

    nodes: tuple[tuple[str, str], ...]

    @property
    def workers(self) -> int:
        return sum(role == "worker" for role, _ in self.nodes)


def found_in(listing: str) -> Found:
    """Read `ROLE IMAGE` lines. Docker gives an image's id in place of a name that now belongs to another image."""
    pairs = (line.split(maxsplit=1) for line in listing.splitlines() if line.strip())
    return Found(tuple((pair[0], pair[1].strip() if len(pair) > 1 else "") for pair in pairs))


def difference(found: Found, wanted: Wanted) -> str | None:
    """What a cluster has otherwise than asked for, as a clause for people; None when it is what was asked for."""
    clauses = []
    if found.workers != wanted.workers:
        clauses.append(f"it has {_workers(found.workers)}, {wanted.workers or 'none'} asked for")
    others = sorted({image for _, image in found.nodes if not any(_is(image, each) for each in wanted.images)})
    if others:
        clauses.append(f"its nodes run {as_list(others)}, {' or '.join(wanted.images)} asked for")
    return "; ".join(clauses) or None


def _workers(count: int) -> str:
    return "no worker" if count == 0 else f"{count} worker{'s' if count > 1 else ''}"


def _is(image: str, wanted: str) -> bool:
    """Whether `image` is the wanted one; a wanted name without a tag stands for its whole repository."""
    if image == wanted:
        return True
    has_tag = ":" in wanted.rpartition("/")[2]
    return not has_tag and image.startswith((f"{wanted}:", f"{wanted}@"))
