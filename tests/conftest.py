"""One Spark session for all tests that need a JVM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.config import Options
from holdfast.engine import session


@pytest.fixture(scope="session")
def sessions() -> Iterator[session.Sessions]:
    started = session.start(Options(memory="2g"), name="holdfast-tests")
    yield started
    started.stop()


#: Tests with real processes that take many minutes: `make soak`. All others: `make test`.
SOAK = (
    "tests/processes/test_one_bad_host.py", "tests/processes/test_one_bad_part.py",
    "tests/processes/test_pairs.py", "tests/verify/chaos/test_chaos.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/spark/" in str(item.path) and not item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.spark)
        if str(item.path).endswith(SOAK):
            item.add_marker(pytest.mark.soak)
