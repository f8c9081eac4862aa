"""Several clients of one output: each has its own name and position. No JVM."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf
from holdfast.errors import InputError
from tests.runtime.conftest import Starter


def test_named_clients_have_separate_folders_and_statuses(run: hf.Run) -> None:
    clients = [run.client("pages"), run.client("pages", name="bob")]
    assert [client.name for client in clients] == ["client-pages", "client-pages+bob"]
    folders = sorted(path.name for path in Path(run.storage, "clients").iterdir())
    assert folders == ["pages", "pages+bob"]
    assert list(run.status()["clients"]) == ["pages", "pages+bob"]


def test_a_second_client_of_the_same_name_is_refused_with_the_remedy(run: hf.Run) -> None:
    run.client("pages")
    bob = run.client("pages", name="bob")
    with pytest.raises(InputError, match=r"already has a client of 'pages'; .* its own name="):
        run.client("pages")
    with pytest.raises(InputError, match="already has a client of 'pages' with name='bob'"):
        run.client("pages", name="bob")
    bob.close()
    assert run.client("pages", name="bob").name == bob.name


def test_clients_that_are_not_durable_need_no_name(run: hf.Run) -> None:
    """They only watch: the position of the durable client does not depend on them."""
    names = [run.client("pages", durable=False).name for _ in range(3)]
    assert names == ["client-pages~1", "client-pages~2", "client-pages~3"]
    assert not run.service.consumers.get("pages", set()) & set(names)
    assert run.client("pages").name == "client-pages"


def test_client_names_that_are_not_valid_file_names_are_refused(run: hf.Run) -> None:
    with pytest.raises(InputError, match="expected letters, digits"):
        run.client("pages", name="../bob")


def test_a_durable_client_that_is_not_open_is_still_a_consumer(started: Starter) -> None:
    """Also a node that is rebuilt retains its rows, although no such client has spoken to it."""
    with started() as run:
        run.client("pages", name="bob")
    with started() as run:
        assert run.service.consumers["pages"] == {"client-pages+bob"}


def test_a_retired_source_whose_feed_still_runs_stops_no_output(started: Starter) -> None:
    with started(feed=True) as run:
        source = run.source("clicks")
        run.wait_for(lambda: source.opened, 10, "the first rows")
        run.retire("clicks")
        feed = next(thread for thread in run._threads if thread.name == "feed-clicks")
        run.wait_for(lambda: not feed.is_alive(), 10, "the feed to stop")
        assert run.failures.lost("pages") is None and source.failure is None
    with started(feed=True) as run:  # after a restart, the feed is not started again
        assert run.source("clicks").ended and run.failures.all() == []
