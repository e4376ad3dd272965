import dataclasses
import subprocess
import sys
from collections import UserList

import pytest

import trackers
from trackers import registry as known


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(known, "_REGISTRY", dict(known._REGISTRY))
    return known._REGISTRY


class Memory(trackers.GeneralTracker):
    name = "memory"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name="unnamed", *, color=None):
        self.run_name = run_name
        self.color = color


class Files(trackers.GeneralTracker):
    name = "files"
    requires_logging_directory = True
    tracker = None

    def __init__(self, run_name, logging_dir):
        self.place = (run_name, logging_dir)


class NeedsPackage(Memory):
    name = "needy"
    requires_package = "a_package_that_nobody_has"


def resolve(log_with, **kwargs):
    return trackers.resolve_trackers(log_with, **{"project_name": "project", **kwargs})


def test_importing_and_resolving_imports_no_sdk():
    program = (
        "import sys, trackers; trackers.resolve_trackers('all', project_name='p', logging_dir='d');"
        "print([name for name in ('torch', 'tensorboard') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["name", "requires_logging_directory", "tracker"])
def test_missing_attribute_is_named_with_its_definition(missing):
    defined = {"name": "x", "requires_logging_directory": False, "tracker": None}
    del defined[missing]
    cls = type("Incomplete", (trackers.GeneralTracker,), defined)
    with pytest.raises(NotImplementedError) as caught:
        cls()
    assert f"{missing} = " in str(caught.value)
    assert not any(f"{name} = " in str(caught.value) for name in defined)
    with pytest.raises(NotImplementedError, match="Incomplete"):
        trackers.register_tracker(cls)


def test_base_methods():
    tracker = Memory()
    tracker.start()
    tracker.store_init_configuration({})
    tracker.finish()
    tracker.resume("an id", 3)
    tracker.begin_anew()
    assert tracker.run_id is None
    for record in (
        tracker.log,
        tracker.log_images,
        tracker.log_table,
        tracker.log_histogram,
        tracker.log_figure,
        tracker.log_text,
        tracker.log_artifact,
        tracker.log_model,
    ):
        with pytest.raises(NotImplementedError, match="'memory'"):
            record({})  # a step may be left out


def test_nothing_resolves_to_nothing():
    assert resolve(None) == resolve([]) == []


def test_name_class_and_instance(registry):
    assert trackers.register_tracker(Memory) is Memory
    instance = Memory("mine")
    by_name, by_class = resolve("memory")[0], resolve(Memory)[0]
    assert type(by_name) is type(by_class) is Memory
    assert resolve(instance) == [instance]


def test_constructor_arguments(tmp_path):
    memory, files = resolve(
        [Memory, Files],
        run_name="run",
        logging_dir=tmp_path,
        init_kwargs={"memory": {"color": "red"}, "not in use": {"x": 1}},
    )
    assert (memory.run_name, memory.color) == ("run", "red")
    assert files.place == ("run", tmp_path)
    assert resolve(Memory)[0].run_name == "project"


def test_a_service_with_projects_gets_both_names():
    class Service(Memory):
        has_projects = True

        def __init__(self, project, *, name=None, color=None):
            self.logged = (project, name, color)

    assert resolve(Service, run_name="run")[0].logged == ("project", "run", None)
    assert resolve(Service)[0].logged == ("project", None, None)
    options = {"memory": {"name": "mine", "color": "red"}}
    assert resolve(Service, run_name="run", init_kwargs=options)[0].logged == (
        "project",
        "mine",
        "red",
    )
    assert options == {"memory": {"name": "mine", "color": "red"}}


PACKAGE = """
from trackers import GeneralTracker

class Theirs(GeneralTracker):
    name = "theirs"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name):
        self.run_name = run_name

class Alias(Theirs):
    name = "another"

number = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package that has the trackers given."""

    def install(**entries):
        (tmp_path / "site" / "their_package-1.0.dist-info").mkdir(parents=True)
        about = tmp_path / "site" / "their_package-1.0.dist-info"
        (about / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n"
        )
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (about / "entry_points.txt").write_text("\n".join(["[cadence.trackers]", *lines, ""]))
        (tmp_path / "site" / "their_package.py").write_text(PACKAGE)
        monkeypatch.syspath_prepend(tmp_path / "site")

    yield install
    sys.modules.pop("their_package", None)


def test_a_package_adds_a_tracker_by_an_entry_point(package, registry, caplog):
    package(theirs="their_package:Theirs")
    with pytest.raises(ValueError, match="'theirs'"):  # among the choices
        resolve("unknown")
    assert "their_package" not in sys.modules  # nobody asked for it
    for _ in range(2):
        assert [one.run_name for one in resolve("theirs")] == ["project"]
    assert "theirs" in trackers.available_trackers()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("no_such_module:Theirs", "ModuleNotFoundError"),
        ("their_package:Missing", "AttributeError"),
        ("their_package:number", "takes a subclass of GeneralTracker"),
        ("their_package:Alias", "Alias.name is 'another'"),
    ],
)
def test_a_broken_entry_point_is_reported(package, caplog, value, error):
    package(broken=value, theirs="their_package:Theirs")
    assert "theirs" in trackers.available_trackers()
    (message,) = caplog.messages
    assert f"The tracker 'broken', {value}, cannot be used" in message
    assert error in message
    with pytest.raises(ImportError, match=error):
        resolve("broken")


def test_a_package_cannot_replace_a_built_in(package, tmp_path):
    package(tensorboard="their_package:Theirs")
    trackers.available_trackers()
    (tracker,) = resolve("tensorboard", logging_dir=tmp_path)
    assert type(tracker) is trackers.TensorBoardTracker


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "a_package_that_nobody_has").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="pip install a_package_that_nobody_has"):
        trackers.select_trackers(NeedsPackage)


def test_duplicates_are_dropped_in_order():
    trackers.register_tracker(Memory)
    first, second = Memory(), Memory()
    assert [type(one) for one in resolve(["memory", Memory, NeedsNothing])] == [
        Memory,
        NeedsNothing,
    ]
    assert resolve(["memory", first, second, first]) == [first, second]


class NeedsNothing(Memory):
    name = "nothing"


def test_trackers_that_cannot_be_hashed():
    @dataclasses.dataclass
    class Record(trackers.GeneralTracker):
        name = "record"
        requires_logging_directory = False
        tracker = None

    instance = Record()
    assert resolve([instance, instance, Record]) == [instance]


def test_any_sequence_of_trackers_is_accepted():
    for kind in (list, tuple, UserList):  # the last is a sequence as Hydra's lists are
        found = resolve(kind([Memory, "csv"]), logging_dir="logs")
        assert [tracker.name for tracker in found] == ["memory", "csv"]


def test_all_means_every_installed_tracker(registry, tmp_path):
    registry.clear()
    for cls in (NeedsPackage, Memory, Files):
        trackers.register_tracker(cls)
    assert trackers.available_trackers() == ["files", "memory"]
    instance = Memory()
    found = resolve(["all", instance], logging_dir=tmp_path)
    assert [type(one) for one in found] == [Files, Memory]
    assert found[1] is instance


def test_unknown_name_gives_choices_and_nearest():
    with pytest.raises(
        ValueError, match=r"'tensorbord'.*mean 'tensorboard'.*'all', .*'tensorboard'"
    ):
        resolve("tensorbord")
    with pytest.raises(ValueError, match=r"is 'neptune'.*register_tracker"):
        resolve("neptune")


@pytest.mark.parametrize("wrong", [3, int, [None]])
def test_wrong_type(wrong):
    with pytest.raises(TypeError, match="log_with takes"):
        resolve(wrong)


def test_a_class_that_takes_the_path_of_its_file_is_refused(tmp_path, monkeypatch):
    class Like(trackers.JsonlTracker):
        pass

    class Own(trackers.JsonlTracker):
        def __init__(self, run_name):
            super().__init__(tmp_path / f"{run_name}.jsonl")

    monkeypatch.chdir(tmp_path)
    for wrong in (trackers.JsonlTracker, Like):
        with pytest.raises(TypeError, match=rf"got the class {wrong.__name__}; pass an instance"):
            trackers.select_trackers(["csv", wrong], logging_dir=tmp_path)
    (own,) = resolve(Own)
    assert own.path == tmp_path / "project.jsonl"
    assert resolve(own) == [own]


def test_missing_directory():
    with pytest.raises(ValueError, match=r"'files' writes files.*project_dir"):
        resolve(Files)


def test_missing_package_of_a_built_in_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "tensorboard" not in trackers.available_trackers()
    for log_with in ("tensorboard", trackers.TensorBoardTracker):
        with pytest.raises(ImportError, match=r"pip install 'cadence-trainer\[tensorboard\]'"):
            resolve(log_with, logging_dir=tmp_path)
    with pytest.raises(ImportError, match="cadence-trainer"):
        trackers.TensorBoardTracker("run", tmp_path)


def test_select_makes_no_tracker(tmp_path):
    instance = Memory()
    chosen = trackers.select_trackers([Files, instance], logging_dir=tmp_path)
    assert chosen == [Files, instance]


def test_register_rejects_a_name_that_is_taken():
    trackers.register_tracker(Memory)
    trackers.register_tracker(Memory)
    other = type("Other", (Memory,), {})
    with pytest.raises(ValueError, match=r"'memory' is taken by .*Memory"):
        trackers.register_tracker(other)


def test_registering_a_redefined_class_replaces_it():
    again = type(Memory.__name__, Memory.__bases__, dict(Memory.__dict__))
    trackers.register_tracker(Memory)
    trackers.register_tracker(again)
    assert type(resolve("memory")[0]) is again


def test_register_rejects_what_is_no_tracker():
    with pytest.raises(TypeError, match="subclass of GeneralTracker"):
        trackers.register_tracker(Memory())
