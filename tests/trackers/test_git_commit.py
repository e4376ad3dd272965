"""Git itself says what the commit is."""

import subprocess

import pytest

from trackers.code import git_commit


@pytest.fixture
def git(tmp_path):
    def run(*words, folder=tmp_path):
        words = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    run("init", "-b", "main")
    return run


def commit(git, **options):
    git("commit", "--allow-empty", "-m", "x", **options)
    return git("rev-parse", "HEAD", **options)


def test_the_commit_of_the_branch_from_any_folder(git, tmp_path):
    assert git_commit(tmp_path) is None  # before the first
    (tmp_path / "a" / "b").mkdir(parents=True)
    first = commit(git)
    assert git_commit(tmp_path) == git_commit(tmp_path / "a" / "b") == first
    second = commit(git)
    assert git_commit(tmp_path) == second != first
    git("checkout", first)
    assert git_commit(tmp_path) == first


def test_the_commit_of_a_packed_branch(git, tmp_path):
    git("checkout", "-b", "feature/main")
    other = commit(git)
    git("checkout", "-b", "main")
    head = commit(git)
    git("pack-refs", "--all")
    assert git_commit(tmp_path) == head != other


def test_the_commit_of_another_working_tree(git, tmp_path):
    first = commit(git)
    git("worktree", "add", "tree", "-b", "other")
    assert git_commit(tmp_path / "tree") == first
    second = commit(git, folder=tmp_path / "tree")
    assert git_commit(tmp_path / "tree") == second
    assert git_commit(tmp_path) == first


def test_without_a_repository_there_is_none(tmp_path):
    assert git_commit(tmp_path) is None


def test_an_unreadable_folder_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert git_commit(".") is None
    assert "The commit of the code cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("head", "refs"),
    [
        ("root:x:0:0", {}),
        ("ref: ../../secret", {}),
        ("ref: refs/../../secret", {}),
        ("ref: refs/heads/main", {"refs/heads/main": "password"}),
        ("ref: refs/heads/main", {"packed-refs": "password refs/heads/main\n"}),
        ("ref: refs/heads/main", {"refs/heads/main": None}),  # a link
    ],
)
def test_what_is_not_a_commit_is_not_returned(tmp_path, head, refs):
    secret = tmp_path / "secret"
    secret.write_text("0" * 40)
    git = tmp_path / "a" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text(head)
    for name, text in refs.items():
        if text is None:
            (git / name).symlink_to(secret)
        else:
            (git / name).write_text(text)
    assert git_commit(tmp_path / "a") is None


def test_the_repository_of_another_user_is_left_out(git, tmp_path, monkeypatch, caplog):
    first = commit(git)
    assert git_commit(tmp_path) == first
    monkeypatch.setattr("os.geteuid", lambda: (tmp_path / ".git").stat().st_uid + 1)
    assert git_commit(tmp_path) is None
    assert f"{tmp_path / '.git'} belongs to another user" in caplog.text
