import os
import sysconfig

import pytest
import torch

import gaverify
from gaverify import tracebacks
from gaverify.tracebacks import Owner, calling_frame, owner_of, set_home, user_frame

PACKAGE = os.path.dirname(gaverify.__file__)
STANDARD = os.path.realpath(sysconfig.get_paths()["stdlib"])


@pytest.fixture(autouse=True)
def _no_home(monkeypatch):
    monkeypatch.setattr(tracebacks, "_home", [])
    owner_of.cache_clear()
    yield
    owner_of.cache_clear()


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("<string>", Owner.MACHINERY),
        ("<frozen runpy>", Owner.MACHINERY),
        (os.path.join(PACKAGE, "passes", "modes.py"), Owner.MACHINERY),
        (os.path.join(PACKAGE, "zoo", "anything.py"), Owner.LIBRARY),
        (os.path.join(os.path.dirname(torch.__file__), "nn", "functional.py"), Owner.MACHINERY),
        (os.path.join(STANDARD, "json", "decoder.py"), Owner.MACHINERY),
        ("/anywhere/lib/python3.11/site-packages/transformers/models/t5.py", Owner.LIBRARY),
        ("/usr/lib/python3/dist-packages/timm/layers.py", Owner.LIBRARY),
        ("/home/somebody/train.py", Owner.USER),
        (__file__, Owner.USER),
    ],
)
def test_who_wrote_a_file(path: str, owner: Owner) -> None:
    assert owner_of(path) is owner


def test_a_script_inside_the_standard_library_is_the_users_once_declared() -> None:
    script = os.path.join(STANDARD, "project", "train.py")
    assert owner_of(script) is Owner.MACHINERY
    set_home(os.path.join(STANDARD, "project"))
    assert owner_of(script) is Owner.USER
    assert owner_of(os.path.join(STANDARD, "json", "decoder.py")) is Owner.MACHINERY


@pytest.mark.parametrize(
    ("home", "user"), [("/v/site-packages/recipes", True), ("/v", False), ("/v/site-packages", False)]
)
def test_a_script_that_is_installed_is_the_users_with_what_lies_beside_it(home: str, user: bool) -> None:
    set_home(home)
    assert (owner_of("/v/site-packages/recipes/full.py") is Owner.USER) is user
    assert owner_of("/v/site-packages/library/net.py") is Owner.LIBRARY


def _run_as(filename: str, source: str) -> dict:
    scope: dict = {"calling_frame": calling_frame, "Owner": Owner}
    exec(compile(source, filename, "exec"), scope)
    return scope


def test_a_librarys_line_is_found_only_where_libraries_count() -> None:
    library = "/anywhere/site-packages/models/net.py"
    scope = _run_as(library, "\n\nfound = calling_frame()\nusers = calling_frame(Owner.USER)")
    assert scope["found"] == (library, 3)
    assert scope["users"] is not None and scope["users"][0] == __file__


def test_an_exception_names_the_innermost_line_that_is_not_torchs() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(5, 4))
    place = user_frame(raised.value)
    assert place is not None and place.partition(":")[0].endswith("test_tracebacks.py")
    assert user_frame(ValueError("never raised")) is None
