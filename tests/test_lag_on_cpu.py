"""Lag from a configuration and back: verl's real YAML, literal values, and verl's own replay buffer as the judge."""

import importlib.util
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_sat import lag, lag_words
from verl_sat.composition import compose, verl_config_dir

SEPARATE = "trainer.v1.trainer_mode=separate_async"
K, W = "trainer.v1.separate_async.parameter_sync_step", "trainer.v1.separate_async.num_warmup_batches"
THRESHOLD, STRATEGY = "trainer.v1.sampler.max_off_policy_threshold", "trainer.v1.sampler.max_off_policy_strategy"
EXACT = [
    "trainer.v1.sampler.custom_sampler.path=pkg://verl_sat.sampler",
    "trainer.v1.sampler.custom_sampler.name=ExactLagReplayBuffer",
]


DEFAULTS = compose([]).config


def account(*overrides):
    """Of verl's configuration with these keys set (composing anew for each would take most of the time)."""
    if overrides and overrides[0].startswith("--"):
        return lag.account(compose(list(overrides)).config)
    return lag.account(changed(DEFAULTS, overrides))


def changed(base, overrides):
    config = base.copy()
    for override in overrides:
        key, value = override.split("=", 1)
        OmegaConf.update(config, key, OmegaConf.create(f"v: {value}").v)
    return config


@pytest.mark.parametrize(
    ("overrides", "versions", "updates", "bound", "updates_bound", "ramp", "kind", "name"),
    [
        ([f"{K}=1", f"{W}=1"], 1, (1, 1), 7, 7, 1, "constant", "lag1"),
        ([f"{K}=8", f"{W}=1"], 1, (8, 15), 7, 63, 1, "broadcast", "lag8"),
        ([f"{K}=1", f"{W}=8", f"{THRESHOLD}=9"], 8, (8, 8), 8, 8, 8, "constant", "lag8_constant"),
        ([f"{K}=1", f"{W}=8"], 7, (7, 7), 7, 7, 7, "constant", "lag7_constant"),  # evicted at 8
        ([f"{K}=1", f"{W}=8", f"{THRESHOLD}=null"], 8, (8, 8), None, None, 8, "constant", "lag8_constant"),
        ([f"{K}=1", f"{W}=8", f"{STRATEGY}=wait"], 8, (8, 8), 14, 14, 8, "constant", "lag8_constant"),
        ([f"{K}=2", f"{W}=3", f"{STRATEGY}=wait"], 3, (6, 7), 9, 19, 3, "broadcast", "lag6"),
        ([f"{K}=1", f"{W}=3", f"{STRATEGY}=wait", f"{THRESHOLD}=1"], 3, (3, 3), 3, 3, 3, "constant", "lag3_constant"),
        ([f"{K}=1", f"{W}=0"], 0, (0, 0), 0, 0, 0, "on_policy", "lag0"),
        ([f"{K}=4", f"{W}=0", f"{THRESHOLD}=null"], 0, (0, 3), 0, 3, 0, "broadcast", "lag0"),
        ([f"{K}=4", f"{W}=1.5"], 1.5, (6, 9), 7, 31, 2, "broadcast", "lag6"),
        ([f"{K}=50", f"{W}=0.14"], 0.14, (7, 56), 7, 399, 1, "broadcast", "lag7"),  # 0.14 * 50 > 7 in floats
        ([f"{K}=4", f"{W}=1.1"], 1.1, (4, 8), 7, 31, 2, "broadcast", "lag4"),
        ([f"{K}=1", f"{W}=1.5"], 1.5, (1, 2), 7, 7, 2, "broadcast", "lag1"),
        ([f"{K}=4", f"{W}=1", "actor_rollout_ref.actor.ppo_epochs=2"], 1, (8, 15), 7, 63, 1, "broadcast", "lag8"),
        ([f"{K}=4", f"{W}=2", f"{THRESHOLD}=null", *EXACT], 2, (8, 11), 2, 11, 2, "broadcast", "lag8"),
    ],
)
def test_A03_separate_async_in_versions_and_updates(
    overrides, versions, updates, bound, updates_bound, ramp, kind, name
):
    found = account(SEPARATE, *overrides)
    assert (found.versions, found.updates, found.versions_bound, found.updates_bound) == (
        versions,
        updates,
        bound,
        updates_bound,
    )
    assert (found.ramp_steps, found.kind, found.name) == (ramp, kind, name)
    assert found.exact == (EXACT[0] in overrides)


def test_the_other_trainers():
    colocated = account("trainer.v1.trainer_mode=colocate_async", "data.train_batch_size=512")
    assert (colocated.mode, colocated.versions, colocated.updates) == ("colocate_async", 1, (2, 3))
    half = account("trainer.v1.trainer_mode=colocate_async", "data.train_batch_size=512",
                   "trainer.v1.colocate_async.num_warmup_batches=0.5")  # fmt: skip
    assert half.updates == (0, 3)  # a whole step is drawn at once: its two updates see old and new samples alike
    sync = account("data.train_batch_size=1024", "actor_rollout_ref.actor.ppo_epochs=2")
    assert (sync.mode, sync.versions, sync.updates, sync.versions_bound) == ("sync", 0, (0, 7), 0)
    assert "8 updates (4 mini-batches x 2 epochs)" in sync.notes[0]
    legacy = account("trainer.use_v1=False")
    assert (legacy.mode, legacy.updates) == ("sync", (0, 3))


def experimental(package, name, *overrides):
    folder = verl_config_dir(f"verl.experimental.{package}")
    search = f"hydra.searchpath=[file://{verl_config_dir()}]"  # theirs is relative to a checkout
    return account("--config-path", str(folder), "--config-name", name, search, *overrides)


def test_A04_the_legacy_asynchronous_trainers():
    off = experimental("one_step_off_policy", "one_step_off_ppo_trainer")
    assert (off.mode, off.versions, off.updates, off.versions_bound) == ("one_step_off", 1, (4, 7), 1)
    full = experimental("fully_async_policy", "fully_async_ppo_trainer", "async_training.staleness_threshold=0")
    assert (full.mode, full.versions, full.updates, full.versions_bound) == ("fully_async", 0, (0, 3), 0)
    tenth = experimental("fully_async_policy", "fully_async_ppo_trainer")
    assert (tenth.versions, tenth.updates, tenth.versions_bound) == (0.1, (0, 4), None)
    assert any("goes on under newer weights" in note for note in tenth.notes)
    half = experimental(
        "fully_async_policy",
        "fully_async_ppo_trainer",
        *("async_training.staleness_threshold=0.5", "async_training.require_batches=2"),
        "async_training.partial_rollout=False",
    )
    assert (half.versions, half.updates, half.versions_bound) == (0.5, (4, 11), 1)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{K}=0", K),
        (f"{K}=1.5", K),
        (f"{W}=-1", W),
        (f"{W}=many", W),
        ("actor_rollout_ref.actor.ppo_epochs=0", "actor_rollout_ref.actor.ppo_epochs"),
        ("trainer.v1.trainer_mode=separate", "trainer.v1.trainer_mode"),
        (f"{STRATEGY}=discard", STRATEGY),
        (f"{THRESHOLD}=0", THRESHOLD),
    ],
)
def test_a_setting_that_verl_would_refuse_is_named(override, key):
    with pytest.raises(lag.LagError, match=key.replace(".", r"\.")):
        account(SEPARATE, override)


@pytest.mark.parametrize("threshold", [2, 5, 8])
@pytest.mark.parametrize("warmup", [1, 4, 7, 8, 9])
def test_what_drop_makes_of_a_lag_is_what_verls_buffer_does(warmup, threshold):
    """A group submitted at step s and tried at step s + lag: verl's own rule, read where it is applied."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    options = {"sampler_kwargs": OmegaConf.create({}), "max_off_policy_strategy": "drop"}
    buffer = ReplayBufferAsync("separate_async", OmegaConf.create({}), max_off_policy_threshold=threshold, **options)
    buffer.finished_keys["train"] = {"a"}

    def survives(age):
        buffer.prompt_global_steps["train"] = {"a": 100}
        return not buffer._stale_terminal_keys(100 + age, "train")

    oldest = max(age for age in range(30) if survives(age))
    found = account(SEPARATE, f"{K}=1", f"{W}={warmup}", f"{THRESHOLD}={threshold}")
    assert found.versions_bound == oldest and found.versions == min(warmup, oldest)


def test_an_exact_lag_of_half_a_batch_is_refused():
    with pytest.raises(lag.LagError, match=f"{W}: 1.5: an exact lag is a whole number"):
        account(SEPARATE, f"{W}=1.5", *EXACT)


@pytest.mark.parametrize(
    ("cycle", "warmup", "threshold", "strategy"),
    [(1, 1, 8, "wait"), (1, 4, 8, "wait"), (1, 8, 8, "wait"), (2, 3, 2, "wait"), (1, 3, 1, "wait"), (2, 1.5, 4, "wait"),
     (1, 0, 8, "wait"), (2, 0, 8, "drop"), (1, 0, None, "drop"), (1, 4, 8, "drop"), (2, 9, 4, "drop")],
)  # fmt: skip
def test_the_bound_is_the_oldest_that_verls_buffer_hands_out(cycle, warmup, threshold, strategy):
    """Most groups of the warm-up finish together, once they block; all others at once. Both bounds are reached."""
    found = account(SEPARATE, f"{K}={cycle}", f"{W}={warmup}", f"{STRATEGY}={strategy}",
                    f"{THRESHOLD}={'null' if threshold is None else threshold}")  # fmt: skip
    late = (threshold or 20) - (0.6 if strategy == "wait" else 1.4)  # steps from submission to the end
    shares = [numerator / 20 for numerator in range(21)]
    assert max(_oldest(cycle, warmup, threshold, strategy, late, share) for share in shares) == found.versions_bound


def _oldest(cycle, warmup, threshold, strategy, late, share, mini_batch=8, steps=30):
    """Largest age of a group that verl's real buffer selects. Time is in trainer steps; its storage is a dict here."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    groups = {}  # uid -> (step of submission, end)
    clock = {"now": 1.0, "step": 1}

    class Buffer(ReplayBufferAsync):
        def _sync_metadata_from_transfer_queue(self):
            self.prompt_global_steps["train"] = {uid: step for uid, (step, _) in groups.items()}
            self.finished_keys["train"] = {uid for uid, (_, end) in groups.items() if end <= clock["now"]}
            self.running_keys["train"] = groups.keys() - self.finished_keys["train"]

        def _clear_groups(self, partition_id, uids):
            for uid in uids:
                del groups[uid]

        def _wait_for_next_poll(self, partition_id, last_debug_time):
            clock["now"] += 0.1
            return last_debug_time

    def submit(count, duration=lambda index: 0.0):
        for index in range(count):
            uid = f"{clock['step']}-{len(groups)}-{clock['now']:.3f}-{index}"
            groups[uid] = (clock["step"], clock["now"] + duration(index))

    buffer = Buffer("separate_async", OmegaConf.create({}), threshold, strategy, OmegaConf.create({}), refill_fn=submit)
    warm, oldest = int(warmup * cycle * mini_batch), 0
    submit(warm, lambda index: late if index < share * warm else 0.0)
    for step in range(1, steps + 1):
        clock["step"] = step
        submit(cycle * mini_batch)
        for _ in range(cycle):
            ready, _ = buffer.wait_for_sampleable(step, "train", mini_batch)
            for uid in buffer._select_prompt_uids("train", ready, mini_batch)[0]:
                oldest = max(oldest, step - groups.pop(uid)[0])
            clock["now"] += 1 / cycle
    return oldest


@given(
    st.integers(0, 40),
    st.sampled_from(["broadcast", "constant"]),
    st.booleans(),
    st.sampled_from([None, 16, 256]),
)
@settings(max_examples=25, deadline=None)
def test_the_inverse_gives_the_lag_back(wanted, kind, exact, mini):
    overrides = lag.overrides_for(wanted, kind=kind, exact=exact, mini_batch_size=mini)
    config = _changed(overrides)
    found = lag.account(config)
    assert found.updates[0] == wanted and found.exact == exact
    assert found.kind == ("on_policy" if not wanted else kind if wanted > 1 else "constant")
    if mini:
        assert config.data.train_batch_size == mini * found.updates_per_version


@given(st.integers(0, 20), st.integers(1, 8))
@settings(max_examples=15, deadline=None)
def test_the_inverse_in_versions(wanted, cycle):
    found = lag.account(_changed(lag.overrides_for(wanted, "versions", updates_per_version=cycle)))
    assert (found.versions, found.updates_per_version) == (wanted, cycle)


def _changed(overrides):
    return changed(DEFAULTS, [SEPARATE, *overrides])


@pytest.mark.parametrize(
    "bad", [{"lag": -1}, {"lag": 1, "kind": "steady"}, {"lag": 1, "unit": "steps"}, {"lag": 1, "mini_batch_size": 0}]
)
def test_the_inverse_refuses_what_is_no_lag(bad):
    with pytest.raises(ValueError, match="lag|unit|mini_batch_size"):
        lag.overrides_for(**bad)


# --- the command --------------------------------------------------------------------------------------------------


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "verl_sat.cli", "lag", *arguments], capture_output=True, text=True)
    return done.returncode, " ".join(done.stdout.split()), done.stderr


def test_the_command_accounts_and_says_what_verl_would_refuse():
    status, text, _ = command(SEPARATE, f"{K}=8", f"{W}=1")
    assert status == 0
    for words in ("1 version, 8 updates old, 15 at the last of a cycle", "7 versions, 63 updates", "lag8",
                  "verl would not start this", "data.train_batch_size=2048"):  # fmt: skip
        assert words in text


def test_the_command_gives_overrides_that_can_be_piped():
    done = subprocess.run(
        [sys.executable, "-m", "verl_sat.cli", "lag", "--for", "8", "--kind", "constant"],
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert lines == lag.overrides_for(8, kind="constant") and account(*lines).name == "lag8_constant"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--for", "8", "--kind", "x"], "expected constant or broadcast"),
        (["--for", "8", f"{K}=2"], "take no arguments of a job"),
        (["--unit", "versions", SEPARATE], "--unit says something about --for"),
        (["--for", "8", "--unit", "versions", "--kind", "constant"], "--kind has no effect on a lag in versions"),
        (["--for", "8", "--updates-per-version", "2"], "--updates-per-version has no effect on a lag in updates"),
        ([f"{K}=0", SEPARATE], K),
        (["a"], "a"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, words):
    status, text, said = command(*arguments)
    assert status == 2 and text == "" and said.startswith("error: ") and words in said and "Traceback" not in said


def test_the_command_says_that_the_sampler_would_refuse_a_threshold():
    _, text, _ = command("--json", SEPARATE, f"{K}=4", f"{W}=8", "data.train_batch_size=1024", *EXACT)
    assert any(line.startswith(f"error: {THRESHOLD}: 8 ") for line in json.loads(text)["refused"])


def test_json_has_everything():
    status, text, _ = command("--json", SEPARATE, f"{K}=2")
    found = json.loads(text)
    assert status == 0 and found["updates"] == [2, 3] and found["name"] == "lag2" and found["refused"]


def test_D04_the_glossary_in_the_documentation_is_the_one_of_the_command():
    from pathlib import Path

    readme = (Path(__file__).parent.parent / "README.md").read_text()
    shown = readme.split("<!-- words:begin -->")[1].split("<!-- words:end -->")[0].strip()
    assert shown == lag_words.as_markdown(), "run: python -m verl_sat.lag_words"
    status, text, _ = command("--words", "--json")
    assert status == 0 and len(json.loads(text)) == len(lag_words.WORDS)


def test_composing_needs_no_verl_in_the_process():
    program = "import sys; from verl_sat.composition import compose; compose([]); print('verl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False" and importlib.util.find_spec("verl")
