"""The recorder: what it keeps, what it drops, and that recordings do not disturb each other."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxfuser import observe
from fxfuser.observe import ExternRecord, KernelRecord, PassRecord, PlanRecord, SegmentationRecord


def test_records_go_to_the_graph_that_is_open() -> None:
    with observe.recording() as recording:
        with observe.graph("forward", 3, "graph text"):
            observe.record(PassRecord("cse", 1, 0.5, "before", "after"))
            observe.record(PlanRecord("plan"))
        with observe.graph("backward", 3):
            observe.record(ExternRecord("mm", "aten.mm", "not lowered"))
    forward, backward = recording.graphs
    assert (forward.name, backward.name) == ("region3.forward", "region3.backward")
    assert ([p.name for p in forward.passes], forward.plan, forward.externs) == (["cse"], "plan", ())
    assert (backward.passes, backward.plan, len(backward.externs)) == ((), "", 1)


def test_nothing_is_recorded_where_nobody_listens() -> None:
    assert not observe.active()
    with observe.graph("forward", 0), observe.recording() as recording:
        assert observe.active()
        observe.record(PlanRecord("of a graph that began before the recording"))
    observe.record(PlanRecord("outside any graph"))
    assert recording.graphs == []
    assert not observe.active()


def test_recordings_nest() -> None:
    with observe.recording() as outer:
        with observe.recording() as inner, observe.graph("inference", 0):
            observe.record(PlanRecord("both"))
        with observe.graph("inference", 1):
            observe.record(PlanRecord("outer"))
    assert [g.plan for g in outer.graphs] == ["both", "outer"]
    assert [g.plan for g in inner.graphs] == ["both"]


def test_a_graph_of_another_thread_is_seen_and_kept_apart() -> None:
    def compile_backward() -> None:
        with observe.graph("backward", 0):
            observe.record(PlanRecord("backward"))

    with observe.recording() as recording, observe.graph("forward", 0):
        thread = threading.Thread(target=compile_backward)
        thread.start()
        thread.join()
        observe.record(PlanRecord("forward"))
    assert {g.graph.kind: g.plan for g in recording.graphs} == {"forward": "forward", "backward": "backward"}


def test_an_error_closes_the_recording_and_the_graph() -> None:
    with pytest.raises(ValueError, match="stop"), observe.recording() as recording, observe.graph("forward", 0):
        raise ValueError("stop")
    observe.record(PlanRecord("late"))
    assert not observe.active()
    assert recording.graphs[0].plan == ""


def test_write(tmp_path: Path) -> None:
    segmentation = SimpleNamespace(segments=(), boundaries=())
    with observe.recording() as recording, observe.graph("forward", 0, "the graph"):
        observe.record(PassRecord("cse", 2, 0.1, "a", "b"))
        observe.record(PassRecord("dce", 0, 0.1, "b", "b"))
        observe.record(SegmentationRecord(segmentation))
        observe.record(KernelRecord("segment0", "fused_add", "import triton"))
        observe.record(PlanRecord("def run(): ..."))
    recording.write(tmp_path)
    folder = tmp_path / "region0.forward"
    assert sorted(p.name for p in folder.iterdir()) == [
        "graph.txt", "pass00.cse.txt", "plan.py", "segment0.fused_add.py", "segments.txt"]
    assert (folder / "pass00.cse.txt").read_text() == "b"
    assert recording.segmentations == (("region0.forward", segmentation),)


def test_a_dump_directory_needs_no_recording_and_survives_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), observe.graph("backward", 1, "the graph", tmp_path):
        assert observe.active()
        observe.record(PlanRecord("plan"))
        raise ValueError("stop")
    assert (tmp_path / "region1.backward" / "plan.py").read_text() == "plan"
    assert (tmp_path / "region1.backward" / "graph.txt").read_text() == "the graph"


def test_a_graph_is_printed_only_for_a_listener() -> None:
    class Graph:
        def __str__(self) -> str:
            raise AssertionError("printed")

    with observe.graph("forward", 0, Graph()):
        pass
    with pytest.raises(AssertionError, match="printed"), observe.recording(), observe.graph("forward", 0, Graph()):
        pass
