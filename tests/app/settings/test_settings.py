import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from reprise.app.settings.experiment import ExperimentSettings
from reprise.app.settings.removed import REMOVED
from reprise.app.settings.sections import CacheSettings, SchedulerSettings, SelectorSettings
from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import SettingsError, experiments, known_settings, load_settings, stray_variables
from reprise.cache.policies import POLICIES
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.engine.build.codec import CODECS
from reprise.kernels.selectors import SELECTORS
from reprise.model.directories import source_of
from reprise.scheduler import make_policy


def load(config: Path | None = None, environ: dict[str, str] | None = None, **flags: str) -> Settings:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return load_settings(flags=dotted, environ=environ or {}, config=config)


def test_flags_beat_the_environment_which_beats_the_file(tmp_path):
    config = tmp_path / "reprise.toml"
    config.write_text("[scheduler]\nmax_seqs = 2\nmax_queued = 3\n[cache]\nttl_s = 4\n")
    environ = {"REPRISE_SCHEDULER__MAX_SEQS": "5", "REPRISE_SCHEDULER__MAX_QUEUED": "6", "PATH": "/bin"}
    settings = load(config, environ, scheduler__max_seqs="7")
    assert (settings.scheduler.max_seqs, settings.scheduler.max_queued, settings.cache.ttl_s) == (7, 6, 4.0)


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        ({"cache.mode": "magic"}, {}, ["cache.mode", "flag", "'attentionstore', 'prefix' or 'recompute'"]),
        ({"cache.hbm_tokns": "1"}, {}, ["cache.hbm_tokns", "did you mean cache.hbm_tokens"]),
        ({"nonsense": "1"}, {}, ["unknown setting nonsense (flag); `reprise serve --help` lists them"]),
        ({"prot": "1"}, {}, ["did you mean server.port?"]),
        ({"model": "x"}, {}, ["did you mean model.source?"]),
        ({"policy": "x"}, {}, ["did you mean cache.policy or scheduler.policy?"]),
        ({"scheduler.polic": "1"}, {}, ["did you mean scheduler.policy?"]),
        ({"scheduler.colour": "1"}, {}, ["scheduler.colour (flag); `reprise serve --help` lists them"]),
        ({"cache.size": "1"}, {}, ["cache.size (flag); `reprise serve --help` lists them"]),
        ({"cache": "{}"}, {}, ["unknown setting cache (flag)"]),
        ({}, {"REPRISE_CACHE__DRAM": "1"}, ["cache.dram", "environment"]),
        ({}, {"REPRISE_CASHE__MODE": "prefix"}, ["cashe.mode (environment)", "did you mean cache.mode"]),
        ({}, {"REPRISE_CACHE__MODE__X": "1"}, ["cache.mode__x (environment)"]),
        ({}, {"REPRISE__MODE": "1"}, ["_mode (environment)"]),
        (
            {},
            {"REPRISE_SERVER__PORT": "99999"},
            ["server.port (environment): must be an integer between 0 and 65535, not 99999"],
        ),
        ({}, {"REPRISE_SERVER__PORT": ""}, ["server.port (environment): is empty; leave it out for the default, 8000"]),
        ({"cache.recall": ""}, {}, ["cache.recall (flag): is empty; leave it out for the default, false"]),
        ({"scheduler.max_seqs": "many"}, {}, ["scheduler.max_seqs (flag): must be an integer between 1 and 4096, not"]),
        ({"server.api_keys": "short"}, {}, ["server.api_keys", "8 to 512"]),
        ({"server.host": "0.0.0.0"}, {}, ["server.host", "server.api_keys", "allow_unauthenticated"]),
        ({"cache.ttl_s": "nan"}, {}, ["cache.ttl_s", "a number greater than 0 and at most 1000000000, not nan"]),
        ({"experiment.truncation_ratio": "7"}, {}, ["must be a number greater than 0 and less than 1, not 7"]),
        ({"experiment.truncation_ratio": "0"}, {}, ["experiment.truncation_ratio", "greater than 0"]),
        ({"cache.policy": "magic"}, {}, ["cache.policy", "'lookahead', 'lru'"]),
        ({"scheduler.itl_target_ms": "-1"}, {}, ["itl_target_ms", "a number between 0 and 60000, or auto, not -1"]),
        ({"scheduler.itl_target_ms": "fast"}, {}, ["itl_target_ms", "a number between 0 and 60000, or auto, not fast"]),
        ({"scheduler.itl_target_ms": ""}, {}, ["itl_target_ms (flag): is empty; leave it out for the default, auto"]),
        ({"cache.recall": "maybe"}, {}, ["cache.recall (flag): must be true or false, not maybe"]),
        ({"experiment.sync_save": "maybe"}, {}, ["experiment.sync_save (flag): must be true or false, not maybe"]),
        ({"experiment.sync_sav": "1"}, {}, ["unknown setting experiment.sync_sav (flag); `reprise serve --help`"]),
        ({"server.traces_endpoint": "here"}, {}, ["server.traces_endpoint (flag)", "http://127.0.0.1:4318/v1/traces"]),
        ({"cache.keep_first_tokens": "-2"}, {}, ["cache.keep_first_tokens", "-1"]),
        ({"cache.dram_gib": "automatic"}, {}, ["cache.dram_gib (flag): must be a number between 0 and 65536, or auto"]),
        (
            {"model.exact": "on", "selector.name": "pairs", "weights.offload": "dram"},
            {},
            ["selector.name pairs and model.exact on exclude each other", "weights.offload dram and model.exact on"],
        ),
        (
            {},
            {"REPRISE_CACHE__DISK_DIR": ""},
            ["cache.disk_dir (environment): is empty; leave it out for the default, ~"],
        ),
        ({"server.keys_file": ""}, {}, ["server.keys_file (flag): is empty; leave it out"]),
        ({}, {"REPRISE_SERVER__TENANT_SECRET_FILE": ""}, ["tenant_secret_file (environment): is empty; leave it out"]),
        ({}, {"REPRISE_MODEL__WEIGHTS": ""}, ["model.weights (environment): is empty; leave it out for the default"]),
        ({}, {"REPRISE_SERVER__HOST": ""}, ["server.host (environment): is empty; leave it out for the default, 127"]),
        ({}, {"REPRISE_CACHE__DISK_GIB": ""}, ["is empty; leave it out for the default, auto"]),
    ],
)
def test_a_bad_setting_is_named_with_its_source_and_what_is_allowed(flags, environ, says):
    with pytest.raises(SettingsError) as error:
        load_settings(flags=flags, environ=environ, config=None)
    assert [part for part in says if part not in str(error.value)] == []


def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """OpenShift and systemd's DynamicUser run programs as a user that no file lists."""

    def nobody(self: Path) -> Path:
        if str(self).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return self

    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(SettingsError, match=r"cache\.disk_dir.*REPRISE_CACHE__DISK_DIR.*HOME"):
        load_settings(flags={}, environ={}, config=None)
    assert load_settings(flags={"cache.disk_dir": str(tmp_path)}, environ={}, config=None).state_dir == tmp_path
    flags = {"cache.disk_dir": str(tmp_path), "server.keys_file": "~/keys"}
    with pytest.raises(SettingsError, match=r"server\.keys_file"):
        load_settings(flags=flags, environ={}, config=None)


@pytest.mark.parametrize(
    ("text", "size"), [(None, None), ("auto", None), ("0", 0), ("0.5", 1 << 29), ("3", 3 << 30), ("0.0", 0)]
)
def test_a_size_is_a_number_or_automatic(tmp_path: Path, text: str | None, size: int | None):
    flags = {} if text is None else {"cache.dram_gib": text}
    environ = {} if text is None else {"REPRISE_CACHE__DISK_GIB": text}
    config = load_settings(flags=flags, environ=environ, config=None).engine_config(b"")
    assert (config.cache.dram_bytes, config.cache.disk_bytes) == (size, size)
    file = tmp_path / "settings.toml"
    file.write_text("[cache]\ndram_gib = " + ('"auto"' if size is None else str(text)))
    assert load_settings(flags={}, environ={}, config=file).engine_config(b"").cache.dram_bytes == size


def test_variables_that_look_like_settings_are_named():
    environ = {
        "REPRISE_PORT": "1", "REPRISE_CACHE_MODE": "prefix", "REPRISE_API_KEYS": "x", "REPRISE_MODEL": "x",
        "REPRISE_FLAVOUR": "sour", "REPRISE_SERVER__PORT": "1", "PORT": "1", "_REPRISE_COMPLETE": "x",
    }  # fmt: skip
    said = {warning.split()[3]: warning.split("; ")[1] for warning in stray_variables(environ)}
    assert said == {
        "REPRISE_PORT": "did you mean REPRISE_SERVER__PORT?",
        "REPRISE_CACHE_MODE": "did you mean REPRISE_CACHE__MODE?",
        "REPRISE_API_KEYS": "did you mean REPRISE_SERVER__API_KEYS?",
        "REPRISE_MODEL": "did you mean REPRISE_MODEL__SOURCE?",
        "REPRISE_FLAVOUR": "one is named REPRISE_SECTION__KEY",
    }


def test_a_slip_of_the_finger_in_a_long_name_is_understood():
    for name, _ in known_settings():
        section, key = name.split(".")
        if len(key) > 5:  # a shorter one leaves too little
            with pytest.raises(SettingsError, match=f"did you mean {name}"):
                load_settings(flags={f"{section}.{key[:2]}{key[3:]}": "1"}, environ={}, config=None)


def test_a_bad_key_is_not_repeated_in_the_message():
    with pytest.raises(SettingsError) as error:
        load(server__api_keys="sk-1234567890,oops oops oops")
    assert "oops" not in str(error.value)
    assert "sk-1234567890" not in repr(load(server__api_keys="sk-1234567890"))


def test_only_the_given_environment_is_read(monkeypatch):
    monkeypatch.setenv("REPRISE_SCHEDULER__MAX_SEQS", "5")
    assert load() == Settings()
    assert Settings().scheduler.max_seqs == 32
    assert load(environ={"REPRISE_CACHE": "of a wrapper script", "OTHER_CACHE__MODE": "x"}) == Settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cache\n", "is not TOML"),
        ("\xff", "is not TOML"),
        ("mode = 1\n", "unknown setting mode"),
        ("cache = 1\n", "unknown setting cache"),
        ("[cashe]\n", "unknown setting cashe"),
        ("[CACHE]\nmode = 'prefix'\n", "unknown setting CACHE.mode"),
        ("[cache]\nmode = 'prefix'\nwrong = 1\n", "unknown setting cache.wrong"),
        ("[cache]\nmode = 1\n", "cache.mode"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, says):
    config = tmp_path / "bad.toml"
    config.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=says) as error:
        load(config)
    assert str(config) in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(SettingsError, match="cannot read"):
            load(path)


def test_lists_come_as_arrays_and_an_empty_table_sets_nothing(tmp_path):
    config = tmp_path / "reprise.toml"
    config.write_text("[model]\naliases = ['a', 'b']\n[cache]\n")
    assert load(config).model.aliases == ("a", "b")
    assert load(config, {"REPRISE_MODEL__ALIASES": "c, d"}).model.aliases == ("c", "d")


def test_listening_beyond_loopback_needs_keys_or_consent():
    assert load(server__host="0.0.0.0", server__api_keys="sk-12345678, sk-abcdefgh").server.api_keys == (
        "sk-12345678",
        "sk-abcdefgh",
    )
    assert load(server__host="::", server__allow_unauthenticated="true").server.host == "::"
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert load(server__host=host).server.host == host


def test_every_setting_reaches_something_and_is_described():
    names = dict(known_settings())
    assert len(names) > 25
    assert all(field.description for field in names.values())


def test_every_eviction_policy_can_be_chosen():
    assert set(get_args(CacheSettings.model_fields["policy"].annotation)) == set(POLICIES)


def test_every_scorer_of_what_a_cut_drops_can_be_chosen():
    assert set(get_args(CacheSettings.model_fields["block_scorer"].annotation)) == set(BLOCK_SCORERS)


def test_every_policy_of_the_scheduler_can_be_chosen():
    assert set(get_args(SchedulerSettings.model_fields["policy"].annotation)) == set(make_policy.POLICIES)


def test_every_codec_can_be_chosen():
    assert set(get_args(CacheSettings.model_fields["codec"].annotation)) == {"raw", "activation", *CODECS}


def test_every_selector_has_its_setting():
    assert set(get_args(SelectorSettings.model_fields["name"].annotation)) == set(SELECTORS)


def test_the_engine_is_told_what_was_set():
    config = load(cache__mode="recompute", engine__threads="2", model__dtype="float32").engine_config(b"s" * 32)
    assert (config.cache.mode, config.threads, config.model.dtype, config.tenant_secret) == (
        "recompute",
        2,
        "float32",
        b"s" * 32,
    )
    assert config.model.source == source_of("")
    cache = {
        "dram_gib": 0.5, "disk_gib": 3, "disk_min_free_gib": 1, "truncation": "disabled",
        "verify_rate": 0.125, "disk_dir": "some/where",
        "policy": "fifo", "block_scorer": "attended", "recall": "true",
    }  # fmt: skip
    told = load(**{f"cache__{name}": str(value) for name, value in cache.items()}).engine_config(b"").cache
    assert (told.dram_bytes, told.disk_bytes, told.disk_min_free_bytes) == (1 << 29, 3 << 30, 1 << 30)
    assert (told.disk_dir, told.recall) == (str(Path.cwd() / "some/where"), True)
    told_as_set = cache.keys() & {field.name for field in msgspec.structs.fields(told)} - {"disk_dir", "recall"}
    assert {name: getattr(told, name) for name in told_as_set} == {name: cache[name] for name in told_as_set}
    assert len(told_as_set) == 4
    assert load(model__source="org/name").engine_config(b"").model.source == "org/name"


def test_the_engine_is_told_of_experiments_which_no_list_shows():
    experiment = {"staging_mib": 7, "read_buffer_layers": 5, "truncation_mode": "recompute", "io_deadline_s": 2.0}
    settings = load(**{f"experiment__{name}": str(value) for name, value in experiment.items()})
    told = settings.engine_config(b"").experiment
    assert (told.staging_bytes, told.read_buffer_layers, told.truncation_mode) == (7 << 20, 5, "recompute")
    assert list(experiments(settings)) == [
        *("experiment.truncation_mode recompute", "experiment.read_buffer_layers 5", "experiment.staging_mib 7"),
        "experiment.io_deadline_s 2.0",
    ]
    assert not list(experiments(Settings()))
    assert not [name for name, _ in known_settings() if name.startswith("experiment.")]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_told_of_with_what_happens_now(name, tmp_path):
    section, key = name.split(".")
    config = tmp_path / "old.toml"
    config.write_text(f"[{section}]\n{key} = 1\n")
    says = f"the setting {name} (file {config}) was removed in 0.3: {REMOVED[name]}"
    with pytest.raises(SettingsError, match=re.escape(says)):
        load(config)
    moved = re.search(r"experiment\.(\w+)", REMOVED[name])
    assert moved is None or moved[1] in ExperimentSettings.model_fields


def test_a_burst_fits_into_the_engines_queue():
    settings = load(scheduler__max_seqs="4", scheduler__max_queued="6")
    assert settings.engine_config(b"").scheduler.max_queued == settings.places == 10


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Settings().cache = CacheSettings()  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        Settings().cache.mode = "recompute"  # type: ignore[misc]


def test_several_keys_share_the_places():
    scheduler = {"max_seqs": 4, "max_queued": 6}
    keys = "sk-secret-1,sk-secret-2"

    def places(*, key_requests: int = 0, **server: object) -> tuple[int, int]:
        sections = {"scheduler": scheduler, "server": server, "limits": {"key_requests": key_requests}}
        settings = Settings.model_validate(sections)
        return settings.places, settings.tenant_places

    assert places() == places(api_keys="sk-secret-1") == (10, 10)
    assert places(api_keys=keys) == places(keys_file="keys.toml") == (10, 5)
    assert places(api_keys=keys, key_requests=7) == (10, 7)
    assert places(key_requests=100) == (10, 10)


@pytest.mark.parametrize(("given", "told"), [(None, None), ("auto", None), ("250", 0.25), ("0", 0.0)])
def test_a_target_for_gaps_is_a_number_or_left_to_the_engine(given, told):
    settings = load() if given is None else load(scheduler__itl_target_ms=given)
    assert settings.engine_config(b"").scheduler.itl_target_s == told
