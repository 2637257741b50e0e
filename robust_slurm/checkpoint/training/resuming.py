"""Resume training from the supervisor's plan, else the newest durable step, else step 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from robust_slurm.resizing.dimensions import DATA
from robust_slurm.resizing.shares import holder, holders_of_blocks
from robust_slurm.resizing.stages import (
    described,
    is_of,
    is_other,
    pipelined,
    ranks_by_stage,
    stage_of,
)
from robust_slurm.resizing.world import TrainingWorld, this_world

from ..capture.sections import RNG, TRAINED, kind_of
from ..capture.state import OpenedSnapshot, State, StateError
from ..capture.taken_over import LOADER, Taken, fixed, is_global, same_shares
from ..copying.slots import map_file
from ..durable import reader, tier
from ..durable.files import DurableError
from ..format.layout import LayoutError, Snapshot, read_snapshot
from .client import Client
from .mesh import RankIds, gather, gather_objects, is_distributed
from .order import some

if TYPE_CHECKING:
    from ..durable.other_shape import SavedStep

_BAD, _OTHER_SHAPE, _OF_STAGE, _GOOD = range(4)
_CANDIDATES = 16  # durable steps that are looked at, newest first


class CheckpointError(RuntimeError):
    """The training cannot go on from where it should; the text says why and what to do."""


def from_memory(
    state: State,
    client: Client,
    plan: Mapping[str, Any],
    lengths: Sequence[int] = (),
    mesh: Mapping[str, int] | None = None,
) -> int:
    """Restore from the files of a plan. Returns its step. Raises CheckpointError.

    The plan names every file that a rank of this node needs. A snapshot lists the ranks whose
    snapshots its own rank needs, and only those are read: in a pipeline, others hold different
    tensors of equal names. In a world of another size a rank goes on with the snapshot of its
    ``origin``, the rank that it was there. It reads positions in the data from the ranks that had
    its shares, and its blocks from the ranks that had parts of them (``lengths``: see
    ``holders_of_blocks``). If the ``mesh`` has a pipeline it takes nothing of another stage.
    """
    step, directory = int(plan["step"]), Path(client.welcome["directory"])
    sources: list[OpenedSnapshot] = []
    times: set[tuple[int, int, int]] = set()
    origin, resized = int(plan.get("origin", state.rank)), "origin" in plan
    named = pipelined(mesh or {})
    own, stage = this_world(named), stage_of(state.rank, named)
    wanted = [origin]
    for rank in wanted:
        name = str(plan["shards"].get(str(rank), ""))
        path = directory / name
        try:
            if not name:
                raise CheckpointError(
                    f"step {step} cannot be restored: rank {rank}'s snapshot was not copied to "
                    f"this node, where rank {state.rank} was not expected; the next start copies it"
                )
            if Path(name).name != name:
                raise OSError(f"the plan names {name!r}")
            snapshot, where = read_snapshot(str(path))
            if (snapshot.rank, snapshot.step) != (rank, step):
                raise OSError(f"it is step {snapshot.step} of rank {snapshot.rank}")
            times.add((snapshot.world, snapshot.epoch, snapshot.line))
            if len(times) > 1:  # a store is asked by step, and may have an older timeline's
                raise OSError("it was saved in another run of the ranks than those before it")
            if not is_of(saved := pipelined(snapshot.mesh), snapshot.world):
                raise OSError(f"its mesh {saved} is not of its {snapshot.world} ranks")
            theirs = stage_of(rank, saved)
            # In a world of the same size, a peer that holds the same may be of another stage.
            if (resized or rank == origin) and is_other(stage, theirs, resized=resized):
                raise CheckpointError(
                    f"step {step} cannot be restored: rank {state.rank} is {described(stage)} "
                    f"here, and rank {rank}, whose snapshot it would take, was {described(theirs)}"
                )
            sources.append(OpenedSnapshot(snapshot, map_file(path, where)))
        except (OSError, LayoutError) as error:
            client.say("unusable", step=step, file=name, why=str(error))
            raise CheckpointError(
                f"step {step} cannot be restored: {path}: {error}. It counts as bad from now on; "
                "the next start uses another copy or an older step"
            ) from None
        if rank == origin and not sources[1:]:
            held: list[int] = []
            if resized:
                held += _holders(snapshot, own)
                held += holders_of_blocks(state.rank, own.size, snapshot.world, lengths)
            wanted += [r for r in dict.fromkeys((*held, *snapshot.needs)) if r != rank]
    try:
        if resized:
            state.restore(sources, Taken(origin, own.shares, anew=bool(plan.get("anew"))))
        else:
            state.restore(sources)
    except StateError as error:
        raise CheckpointError(_other_model(step, error)) from None
    return step


def from_durable(
    state: State,
    objects: Mapping[str, Any],
    directory: str,
    world: RankIds,
    mesh: Mapping[str, int],
    only: int | None,
    say: Callable[[str], None],
    *,
    cut: bool = False,
) -> int:
    """Restore the newest durable step that every rank can read, and return it.

    ``only``: the newest one that may be taken, which robust-srun has chosen. ``cut``: parameters
    are in blocks. All ranks call it. 0 if there is none. Raises CheckpointError.
    """
    steps, last = [only] if only is not None else _candidates(directory), ""
    unread: list[int] = []
    for step in steps:
        why, outcome, loaded = "", _BAD, list[OpenedSnapshot]()
        try:
            outcome, loaded = _read(state, directory, step, world, mesh, cut=cut)
        except (DurableError, OSError, LayoutError) as error:
            why = last = str(error)
        outcomes = [each[0] for each in gather([outcome])]
        if world.rank == 0 and _BAD not in outcomes:  # else it may be a node's way to all of them
            for bad_step in unread:
                tier.doubt(directory, bad_step, "a rank could not read it")
        try:
            if min(outcomes) == _GOOD:
                state.restore(loaded)
                return step
            if set(outcomes) == {_OF_STAGE}:
                _take_stage(state, objects.get("loader"), loaded, world, this_world(mesh), say)
                return step
            if set(outcomes) <= {_OF_STAGE, _OTHER_SHAPE}:
                reshard(state, objects, directory, step, world, this_world(pipelined(mesh)), say)
                return step
        except (StateError, DurableError) as error:
            raise CheckpointError(_other_model(step, error)) from None
        bad = [rank for rank, each in enumerate(outcomes) if each != _GOOD]
        say(f"durable step {step} is skipped: {why or f'rank {bad[0]} cannot read it'}")
        unread += [step] if _BAD in outcomes else []
        if step == only:  # robust-srun has looked at its manifest alone
            steps += [older for older in _candidates(directory) if older < step]
    if steps:
        raise CheckpointError(
            f"none of the checkpoints in {directory} can be used (steps "
            f"{', '.join(map(str, steps))}; {last or 'see the other ranks'}). Look at them with "
            f"`robust-ckpt verify {directory}`; to start from scratch, move them away"
        )
    return 0


def _candidates(directory: str) -> list[int]:
    """The steps that rank 0 sees, newest first, doubted ones last: the same list on every rank."""
    found: Sequence[int] = ()
    trouble = None
    if directory:
        try:
            steps, unreadable = tier.list_steps(directory)
            order = [(not each.mark.doubt, each.step) for each in steps]
            order += [(True, step) for step in unreadable]  # each is tried, and named
            found = [step for _, step in sorted(order, reverse=True)[:_CANDIDATES]]
        except (DurableError, OSError) as error:
            trouble = error
    padded = [*found, *[-1] * (_CANDIDATES - len(found))]
    seen = gather([int(trouble is not None), *padded])[0]
    if seen[0]:
        raise CheckpointError(
            f"the checkpoint directory cannot be read: {trouble or 'see rank 0'}"
        ) from None
    return [step for step in seen[1:] if step >= 0]


def _holders(snapshot: Snapshot, own: TrainingWorld) -> list[int]:
    """Return the ranks of a snapshot's world and stage that had the shares which are ``own``."""
    named = pipelined(snapshot.mesh)
    if not named:
        return [holder(share, snapshot.world) for share in own.shares]
    alike = ranks_by_stage(named, snapshot.world)[stage_of(snapshot.rank, named)]
    return [alike[holder(share, len(alike))] for share in own.shares]


def _read(
    state: State, directory: str, step: int, world: RankIds, mesh: Mapping[str, int], *, cut: bool
) -> tuple[int, list[OpenedSnapshot]]:
    """Return what this rank can restore of a durable step, and how. Raises DurableError."""
    try:
        return _GOOD, reader.load(directory, step, world.rank, world.size, mesh)
    except reader.OtherShape:
        if cut or not pipelined(mesh):
            return _OTHER_SHAPE, []
    own = this_world(mesh)
    # The ranks that would have the last share and the one after it tell how many there were.
    asked = (*own.shares, own.share_count - 1, own.share_count)
    loaded = reader.load_of_stage(directory, step, world.rank, world.size, mesh, asked)
    fits = bool(loaded) and state.like(loaded[0].snapshot)
    return (_OF_STAGE if fits else _OTHER_SHAPE), loaded


def _take_stage(
    state: State,
    loaders: Any,
    loaded: Sequence[OpenedSnapshot],
    world: RankIds,
    own: TrainingWorld,
    say: Callable[[str], None],
) -> None:
    """Restore what ranks of this one's stage saved: all but generators, and positions in the data
    only if those ranks had the same shares of the batch. Raises StateError."""
    first = loaded[0].snapshot
    by_shares = not fixed(loaders, own.shares) and all(
        same_shares(each.snapshot, own.share_count, each.snapshot.mesh) for each in loaded
    )
    positions = loaders is None or is_global(loaders) or by_shares
    state.restore(loaded, Taken(first.rank, own.shares, anew=True, positions=positions))
    for note in reader.notes(first, first.world, world.size):
        if not positions or reader.LOADERS not in note:
            say(note)


def reshard(
    state: State,
    objects: Mapping[str, Any],
    directory: str,
    step: int,
    world: RankIds,
    own: TrainingWorld,
    say: Callable[[str], None],
) -> None:
    """Restore what another number of ranks saved: all but what belongs to one rank alone.

    The positions of loaders are restored if those ranks had the same shares of the batch.
    """
    from ..durable import other_shape

    saved = other_shape.read(directory, step)
    taken, problem = _find_unlike(saved, state, drifted=_data_only(directory, step))
    if problems := [each for each in gather_objects(problem) if each]:  # of any rank, on all
        raise DurableError(problem or problems[0])
    _check_all_asked(saved, state, world)
    anew = sorted(state.generators() & saved.unlike)
    state.restore_any(saved.state, (RNG, LOADER, *anew))
    positions = _positions(state, objects.get("loader"), directory, step, own)
    for note in saved.notes(world.size, taken, anew, positions=positions):
        say(note)


def _find_unlike(saved: SavedStep, state: State, *, drifted: bool) -> tuple[list[str], str]:
    """Return the names of tensors here of which ranks have saved different ones and those of the
    lowest rank are taken: buffers, and all if replicas have ``drifted`` apart. And why the step
    cannot be used: nothing tells which of other tensors is this rank's; "" if it can."""
    asked, buffers = state.asked()
    found = []
    for name in sorted(saved.differing):
        kind = kind_of(name)
        if kind not in TRAINED or (kind == "model" and asked and name not in asked):
            continue
        if name not in buffers and not drifted:
            return [], (
                f"{saved.where}: {name} differs between the ranks that saved it (stages of a "
                "pipeline?), and nothing tells which of them is this rank's. Go on with as many "
                "ranks as saved it"
            )
        found.append(name)
    return found, ""


def _check_all_asked(saved: SavedStep, state: State, world: RankIds) -> None:
    """Raise StateError if a part of a model that was saved in parts is on no rank here."""
    if not saved.state.stages or (world.size > 1 and not is_distributed()):
        return
    there = state.saved_names(saved.state.own.values)
    every = gather_objects(state.asked()[0])
    if lost := sorted(there.difference(*every)):
        raise StateError(f"only the checkpoint has {some(lost)}")


def _data_only(directory: str, step: int) -> bool:
    """True if the ranks that saved a step named a mesh of data-parallel dimensions only."""
    mesh = tier.read_manifest(tier.step_dir(directory, step)).mesh
    return bool(mesh) and DATA.issuperset(name for name, size in mesh.items() if size > 1)


def _positions(state: State, loaders: Any, directory: str, step: int, whole: TrainingWorld) -> bool:
    """Restore each share's loader from the rank that had it. False: not saved by these shares."""
    if loaders is None or fixed(loaders, whole.shares):
        return False
    where = tier.step_dir(directory, step)
    manifest = tier.read_manifest(where)
    # The ranks that would have the last share and the one after it tell how many there were.
    wanted = (*whole.shares, whole.share_count - 1, whole.share_count)
    ranks = sorted({holder(share, manifest.world) for share in wanted})
    parts = [tier.read_rank(where, manifest, rank) for rank in ranks]
    sources = [OpenedSnapshot(part.snapshot, reader.Tensors(where, part)) for part in parts]
    return state.restore_positions(sources, whole.share_count)


def named(objects: Any) -> dict[str, Any]:
    """One object, or a list or dict of them, by name."""
    if objects is None:
        return {}
    if isinstance(objects, Mapping):
        return dict(objects)
    if isinstance(objects, (list, tuple)) and not isinstance(objects, torch.nn.Module):
        return {str(i): each for i, each in enumerate(objects)}
    return {"": objects}


def _other_model(step: int, error: Exception) -> str:
    return (
        f"step {step} does not fit this script: {error}. Use the model and optimizer that it was "
        "saved with, or another checkpoint directory"
    )
