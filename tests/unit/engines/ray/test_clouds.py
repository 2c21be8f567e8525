"""Notices of clouds, read from a service on this machine that answers as theirs do."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import paceline as pl
from paceline.engines.ray.clouds import notice
from tests.unit.engines.ray.metadata import NAME, Service, serving


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serving() as found:
        monkeypatch.setenv("PACELINE_METADATA_URL", found.url)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not used
        yield found


def test_a_machine_that_stays_has_no_notice(service: Service) -> None:
    service.events = [("Preempt", ["another"]), ("Freeze", [NAME])]
    assert [notice(cloud) for cloud in ("aws", "gcp", "azure")] == [None, None, None]
    assert len(service.asked) == 5  # the token as well, and the machine's name


def test_each_cloud_tells_of_a_machine_that_it_takes_back(service: Service) -> None:
    service.action, service.preempted = "terminate", True
    service.events = [("Preempt", ["another", NAME])]
    assert notice("aws") == "AWS will terminate this machine at 2026-11-18T08:22:00Z"
    assert notice("gcp") == "Google Cloud preempts this machine"
    assert notice("azure") == "Azure announces Preempt at any moment"


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("answer", [(500, "oops"), (200, "<html>"), (200, "[]"), (200, '{"a": 1}')])
def test_another_answer_is_no_notice(
    service: Service, cloud: str, answer: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "answer", lambda *given: answer)
    assert notice(cloud) is None


def test_a_service_that_is_absent_or_silent_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engines.ray.clouds._SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        monkeypatch.setenv("PACELINE_METADATA_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert notice("gcp") is None
    assert notice("gcp") is None  # refused now


def test_other_clouds_are_refused() -> None:
    with pytest.raises(ValueError, match="use aws, gcp or azure"):
        pl.Kind("spot", cloud="ibm")
