"""The compiled operators of every instruction set that this CPU has."""

from pathlib import Path

import pytest
from trimtab_kernels.native.build import FOLDER, build, compiler, library_name
from trimtab_kernels.native.library import NativeLibrary, open_library, usable_instruction_sets


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package's libraries if they were compiled from the current sources, else compile them."""
    paths = {name: FOLDER / library_name(name) for name in usable_instruction_sets()}
    if paths and all(isinstance(open_library(path, name), NativeLibrary) for name, path in paths.items()):
        return FOLDER
    if compiler() is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("compiled")
    build(folder)
    return folder


@pytest.fixture(params=usable_instruction_sets() or ["none"])
def library(request: pytest.FixtureRequest, compiled: Path) -> NativeLibrary:
    if request.param == "none":
        pytest.skip("no instruction set is known for this CPU")
    found = open_library(compiled / library_name(request.param), request.param)
    assert isinstance(found, NativeLibrary)
    return found
