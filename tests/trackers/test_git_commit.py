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


def test_the_commit_of_another_working_tree(git, tmp_path):
    first = commit(git)
    git("worktree", "add", "tree", "-b", "other")
    assert git_commit(tmp_path / "tree") == first
    second = commit(git, folder=tmp_path / "tree")
    assert git_commit(tmp_path / "tree") == second
    assert git_commit(tmp_path) == first


def test_without_a_repository_there_is_none(tmp_path):
    assert git_commit(tmp_path) is None


def test_without_git_or_a_folder_there_is_none(git, tmp_path, monkeypatch):
    commit(git)
    assert git_commit(tmp_path / "absent") is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) is None
