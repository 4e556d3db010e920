"""Settings: every field checked, every message with its full key, and the way from Hydra's groups to the loss.

Covered: wrong values and keys through the dataclass, the raw-block check and Hydra; the shipped groups on verl's own
configurations; freezing, pickling and rebuilding; what the losses get. Not covered: the driver's preflight.
"""

import copy
import functools
import pickle
from pathlib import Path

import pytest
import ray.cloudpickle
import torch
import verl
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig, PolicyLossConfig

import verl_sat.conf
from verl_sat.config import SAT_KEY, SATConfig, SATConfigError, SATPolicyLossConfig, get_sat_config, validate_sat_block

DEFAULTS = dict(
    quantile=0.90,
    kernel="hill",
    exponent=2.0,
    scope="auto",
    q=None,
    q_min=0.0,
    advantage_clip_low=None,
    advantage_clip_high=None,
    advantage_clip_scope="all",
)
NAN, INF = float("nan"), float("inf")
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
WRONG = [
    ("quantile", "zzz", "(0, 1]"),
    ("quantile", "0.9", "(0, 1]"),
    ("quantile", 1.5, "(0, 1]"),
    ("quantile", -0.1, "(0, 1]"),
    ("quantile", 0, "(0, 1]"),
    ("quantile", True, "(0, 1]"),
    ("quantile", NAN, "(0, 1]"),
    ("quantile", None, "(0, 1]"),
    ("quantile", [0.9], "(0, 1]"),
    ("kernel", "hil", "did you mean 'hill'?"),
    ("kernel", "gauss", "'hill', 'hill_excess', 'inverse_power' or 'none'"),
    ("kernel", None, "'hill', 'hill_excess', 'inverse_power' or 'none'"),
    ("kernel", 2, "'hill', 'hill_excess', 'inverse_power' or 'none'"),
    ("exponent", 0, "> 0"),
    ("exponent", -2.0, "> 0"),
    ("exponent", INF, "> 0"),
    ("exponent", False, "> 0"),
    ("scope", "microbatch", "did you mean 'micro_batch'?"),
    ("scope", "dp-group", "did you mean 'dp_group'"),
    ("scope", "minibatch", "did you mean 'mini_batch'"),
    ("scope", ["auto"], "did you mean 'auto'?"),
    ("q", -0.1, ">= 0, or null"),
    ("q", "auto", ">= 0, or null"),
    ("q", INF, ">= 0, or null"),
    ("q_min", -1e-9, ">= 0"),
    ("q_min", None, ">= 0"),
    ("advantage_clip_low", 5, "<= 0, or null"),
    ("advantage_clip_low", NAN, "<= 0, or null"),
    ("advantage_clip_high", -5, ">= 0, or null"),
    ("advantage_clip_high", "5", ">= 0, or null"),
    ("advantage_clip_scope", "Stale", "did you mean 'stale'?"),
    ("advantage_clip_scope", True, "'all' or 'stale'"),
]
RIGHT = [
    ("quantile", 1, 1.0),
    ("quantile", 0.001, 0.001),
    ("kernel", "none", "none"),
    ("exponent", 3, 3.0),
    ("scope", "micro_batch", "micro_batch"),
    ("q", 0, 0.0),
    ("q", 0.02, 0.02),
    ("q_min", 1, 1.0),
    ("advantage_clip_low", -5, -5.0),
    ("advantage_clip_low", 0, 0.0),
    ("advantage_clip_high", 5, 5.0),
    ("advantage_clip_scope", "stale", "stale"),
]


def fields_of(config):
    return {name: config[name] for name in DEFAULTS}


def test_defaults():
    assert fields_of(SATConfig()) == DEFAULTS
    assert set(SATConfig()) - {"_target_"} == set(DEFAULTS)


@pytest.mark.parametrize("key, value, expected", RIGHT)
def test_right_values_are_taken_ints_as_floats(key, value, expected):
    for made in (SATConfig(**{key: value}), validate_sat_block({key: value})):
        assert fields_of(made) == {**DEFAULTS, key: expected} and type(made[key]) is type(expected)


@pytest.mark.parametrize("key, value, allowed", WRONG)
def test_wrong_values_name_key_value_and_range(key, value, allowed):
    for make in (
        lambda: SATConfig(**{key: value}),
        lambda: validate_sat_block({key: value}),
        lambda: SATPolicyLossConfig(loss_mode="sat_grpo", sat={key: value}),
        lambda: get_sat_config({"loss_mode": "sat_grpo", "sat": {key: value}}),
    ):
        with pytest.raises(SATConfigError) as error:
            make()
        message = str(error.value)
        assert f"actor_rollout_ref.actor.policy_loss.sat.{key}={value!r}" in message and allowed in message
        assert "\n" not in message
        if key == "scope":
            assert "'auto', 'micro_batch', 'dp_group', 'mini_batch' or 'running'" in message


def test_C01_a_misspelt_key_is_named_with_a_suggestion():
    for make in (
        lambda: validate_sat_block({"quantil": 0.9}),
        lambda: SATPolicyLossConfig(loss_mode="sat_grpo", sat={"quantil": 0.9}),
        lambda: get_sat_config(OmegaConf.create({"sat": {"quantil": 0.9}})),
    ):
        with pytest.raises(SATConfigError, match=r"policy_loss\.sat\.quantil: unknown key; did you mean 'quantile'"):
            make()
    with pytest.raises(SATConfigError) as error:
        validate_sat_block({"zzz": 1})
    assert "did you mean" not in str(error.value) and all(key in str(error.value) for key in DEFAULTS)
    with pytest.raises(SATConfigError, match="unknown key"):
        validate_sat_block({1: 2})


def test_a_block_that_is_no_mapping_and_a_prefix_of_its_own():
    with pytest.raises(SATConfigError, match="expected a block with the keys quantile"):
        validate_sat_block("hill")
    with pytest.raises(SATConfigError, match=r"^a\.b\.quantile=2 "):
        validate_sat_block({"quantile": 2}, prefix="a.b")
    assert isinstance(SATConfigError("x"), ValueError)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "bypass_mode", None])
@pytest.mark.parametrize("sat", [{}, {"quantile": 0.5}, SATConfig()])
def test_a_sat_block_beside_another_loss_is_an_error(loss_mode, sat):
    with pytest.raises(SATConfigError) as error:
        SATPolicyLossConfig(loss_mode=loss_mode, sat=sat)
    message = str(error.value)
    assert f"{POLICY_LOSS}.loss_mode={loss_mode!r}" in message and "sat_gspo" in message
    assert ("trainer.use_v1" in message) == (loss_mode == "bypass_mode")


def test_null_block():
    assert SATPolicyLossConfig(loss_mode="vanilla", sat=None).sat is None
    assert SATPolicyLossConfig(loss_mode="sat_grpo", sat=None).sat == SATConfig()
    assert SATPolicyLossConfig().loss_mode == "sat_gspo"


# --- survival ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dumps", [pickle.dumps, ray.cloudpickle.dumps], ids=["pickle", "ray"])
def test_C02_settings_survive_pickle_and_a_rebuild_from_dict(dumps):
    config = SATPolicyLossConfig(loss_mode="sat_grpo", sat={"quantile": 0.7, "advantage_clip_high": 5})
    for rebuilt in (
        pickle.loads(dumps(config)),
        SATPolicyLossConfig(**dict(config)),
        SATPolicyLossConfig(**{**dict(config), "sat": dict(config.sat)}),
    ):
        assert type(rebuilt) is SATPolicyLossConfig and rebuilt == config
        assert fields_of(rebuilt.sat) == {**DEFAULTS, "quantile": 0.7, "advantage_clip_high": 5.0}
        assert get_sat_config(rebuilt) == config.sat
    assert "sat" in set(config)  # a declared field, so it is part of iteration too
    with pytest.raises(AttributeError):
        config.loss_mode = "vanilla"
    with pytest.raises(AttributeError):
        config.sat.quantile = 0.5


def test_get_sat_config_of_everything_verl_may_hold():
    wanted = {**DEFAULTS, "quantile": 0.7}
    assert fields_of(get_sat_config(SATPolicyLossConfig(sat={"quantile": 0.7}))) == wanted
    assert fields_of(get_sat_config({"sat": {"quantile": 0.7}})) == wanted
    assert fields_of(get_sat_config(OmegaConf.create({"sat": {"quantile": 0.7}}))) == wanted
    for plain in (None, PolicyLossConfig(loss_mode="sat_grpo"), {}, {"sat": None}, OmegaConf.create({"sat": None})):
        assert get_sat_config(plain) == SATConfig()


def test_get_sat_config_validates_a_raw_block_once():
    raw = {"sat": {"quantile": 0.65, "kernel": "none"}}
    assert get_sat_config(raw) is get_sat_config(raw)
    assert get_sat_config({"sat": {"quantile": 1.0}}).quantile == 1
    with pytest.raises(SATConfigError):  # True == 1.0, but not here
        get_sat_config({"sat": {"quantile": True}})
    made = SATPolicyLossConfig(sat={})
    assert get_sat_config(made) is made.sat


# --- Hydra ------------------------------------------------------------------------------------------------------


@functools.cache  # about a second each
def _composed(trainer, *overrides):
    searchpath = "hydra.searchpath=[pkg://verl_sat.conf]"
    actor = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(trainer, overrides=[searchpath, actor, *overrides])


def composed(*overrides, group="gspo", trainer="ppo_trainer"):
    """verl's configuration as its command line composes it, with `+sat=GROUP` and further overrides."""
    return copy.deepcopy(_composed(trainer, *([f"+sat={group}"] if group else []), *overrides))


def instantiated(config):
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize("trainer", ["ppo_trainer", "ppo_megatron_trainer"])
@pytest.mark.parametrize("group, agg", [("grpo", "token-mean"), ("gspo", "seq-mean-token-mean")])
def test_C01_group_sets_loss_dataclass_aggregation_and_bypass(group, agg, trainer):
    config = composed(group=group, trainer=trainer)
    plain = composed(group=None, trainer=trainer)
    actor = config.actor_rollout_ref.actor
    assert actor.policy_loss.loss_mode == f"sat_{group}" and actor.loss_agg_mode == agg
    assert actor.policy_loss.sat == DEFAULTS
    assert config.algorithm.rollout_correction.bypass_mode is True
    assert config.actor_rollout_ref.rollout.calculate_log_probs is True
    # and nothing else: undoing these gives verl's own configuration
    OmegaConf.set_struct(config, False)
    actor.loss_agg_mode, actor.policy_loss.loss_mode = "token-mean", "vanilla"
    actor.policy_loss._target_ = plain.actor_rollout_ref.actor.policy_loss._target_
    del actor.policy_loss["sat"]
    config.algorithm.rollout_correction.bypass_mode = False
    config.actor_rollout_ref.rollout.calculate_log_probs = plain.actor_rollout_ref.rollout.calculate_log_probs
    assert OmegaConf.to_container(config) == OmegaConf.to_container(plain)


@pytest.mark.parametrize("trainer", ["ppo_trainer", "ppo_megatron_trainer"])
@pytest.mark.parametrize("group", ["grpo", "gspo"])
def test_C01_group_instantiates_through_verl(group, trainer):
    actor = instantiated(composed(group=group, trainer=trainer))
    assert isinstance(actor, ActorConfig) and type(actor.policy_loss) is SATPolicyLossConfig
    assert type(actor.policy_loss.sat) is SATConfig and fields_of(actor.policy_loss.sat) == DEFAULTS
    assert actor.policy_loss.clip_cov_ratio == 0.0002  # verl's own fields are still there


def test_C01_every_key_is_overridden_without_a_plus():
    changed = {key: (value, expected) for key, value, expected in RIGHT}
    assert set(changed) == set(DEFAULTS)
    actor = instantiated(composed(*(f"{SAT_KEY}.{key}={value}" for key, (value, _) in changed.items())))
    assert fields_of(actor.policy_loss.sat) == {key: expected for key, (_, expected) in changed.items()}
    assert not [key for key, (_, expected) in changed.items() if expected == DEFAULTS[key]]


def test_C01_two_file_form_and_its_switch(tmp_path):
    """A named configuration with the group in its defaults list, switched from the command line without a plus."""
    (tmp_path / "job.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config, pkg://verl_sat.conf]\n"
        "defaults: [ppo_trainer, sat: gspo, _self_]\n"
        "actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 1, policy_loss: {sat: {q: 0.03}}}}\n"
    )
    for overrides, mode in ([], "sat_gspo"), (["sat=grpo"], "sat_grpo"):
        with initialize_config_dir(str(tmp_path), version_base=None):
            config = compose("job", overrides=overrides)
        actor = instantiated(config)
        assert actor.policy_loss.loss_mode == mode and actor.policy_loss.sat.q == 0.03
        assert config.algorithm.rollout_correction.bypass_mode is True and "sat" not in config


def test_C01_values_arrive_in_the_loss():
    actor = instantiated(composed(f"{SAT_KEY}.q=0.03", f"{SAT_KEY}.advantage_clip_high=1", group="grpo"))
    old, advantages, mask = torch.full((2, 8), -1.0), torch.full((2, 8), 2.0), torch.ones(2, 8)
    log_prob = old + 0.04
    actor = pickle.loads(ray.cloudpickle.dumps(actor))  # as on its way to a worker
    _, values = get_policy_loss_fn(actor.policy_loss.loss_mode)(old, log_prob, advantages, mask, "token-mean", actor)
    assert values["actor/sat/quantile"] == pytest.approx(0.03)
    assert values["actor/sat/stale_frac"] == values["actor/sat/advantage_clipfrac"] == 1
    # the loss also takes the configuration before it became a dataclass
    raw = composed(f"{SAT_KEY}.q=0.03", f"{SAT_KEY}.advantage_clip_high=1", group="grpo").actor_rollout_ref.actor
    _, again = get_policy_loss_fn("sat_grpo")(old, log_prob, advantages, mask, "token-mean", raw)
    assert again == values


@pytest.mark.parametrize(
    "override, message",
    [
        (f"{SAT_KEY}.quantile=zzz", f"{SAT_KEY}.quantile='zzz' is not allowed"),
        (f"{SAT_KEY}.quantile=1.5", f"{SAT_KEY}.quantile=1.5 is not allowed"),
        (f"{SAT_KEY}.quantile=true", f"{SAT_KEY}.quantile=True is not allowed"),
        (f"{SAT_KEY}.quantile='\"0.9\"'", "is not allowed"),
        (f"{SAT_KEY}.kernel=hil", "did you mean 'hill'?"),
        (f"{SAT_KEY}.scope=batch", "expected 'auto', 'micro_batch'"),
        (f"++{SAT_KEY}.quantil=0.9", f"{SAT_KEY}.quantil: unknown key; did you mean 'quantile'?"),
        (f"{POLICY_LOSS}.loss_mode=vanilla", f"{POLICY_LOSS}.loss_mode='vanilla' does not read the block"),
        (f"{SAT_KEY}=5", f"{SAT_KEY}=5 is not allowed: expected a block"),
    ],
)
def test_C01_wrong_overrides_are_named_through_hydra(override, message):
    with pytest.raises((InstantiationException, SATConfigError)) as error:
        instantiated(composed(override))
    assert message in str(error.value)


def test_shipped_groups_list_every_key_and_comment_above_it():
    """A group that misses a key makes a plain override of it fail; verl's style wants its comments above."""
    groups = sorted(Path(verl_sat.conf.__file__).parent.glob("sat/*.yaml"))
    assert [path.stem for path in groups] == ["grpo", "gspo"]
    for path in groups:
        lines = path.read_text().splitlines()
        assert lines[0] == "# @package _global_"  # else everything lands below a top-level key `sat`
        block = OmegaConf.load(path).actor_rollout_ref.actor.policy_loss.sat
        assert OmegaConf.to_container(block) == DEFAULTS
        for number, line in enumerate(lines):
            if line.strip().split(":")[0] in DEFAULTS:
                assert lines[number - 1].strip().startswith("#"), line


def test_verl_is_the_one_the_groups_were_written_for():
    assert verl.__version__.startswith("0.9.")
