"""Adapters that people made with PEFT, or for PEFT, on models with a tied head."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac import lslora
from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning
from jaxkfac.jobs.cli.finetune._plan import plan_run, run_shapes
from jaxkfac.models import Pairs, generate, load_decoder, load_encoder_decoder
from tests._transformers import SIZES, torch, transformers

peft = pytest.importorskip("peft")

TIED = SIZES | {"tie_word_embeddings": True}
IDS = np.random.default_rng(0).integers(3, 31, (2, 9)).astype(np.int32)
CLOSE = {"atol": 2e-5, "rtol": 0}
EMBEDDING, HEAD = "model/embed_tokens/embedding", "lm_head/kernel"


def torch_model(kind="llama", **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TIED | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # large enough that one matrix in another's place shows
        model.get_input_embeddings().weight.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A folder with a tied Llama, and the decoder in it."""
    folder = tmp_path_factory.mktemp("tied")
    torch_model().save_pretrained(folder)
    return folder, load_decoder(folder, dtype=jnp.float32, remat=False)


def logits_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()).logits.numpy()


def trained_by_peft(model, folder, **settings):
    """A folder that PEFT wrote after training, and the logits with it."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=3, **settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(0.2 * torch.randn(x.shape))
    model.save_pretrained(folder)
    return logits_of(model)


def ours(decoder, adapters, config):
    adapted = lslora.attach(decoder.apply_fn, config)
    return jax.jit(adapted)(decoder.params, adapters, jnp.asarray(IDS))


def saved_for_peft(decoder, adapters, config, folder):
    """Logits of the PEFT model that opens what is saved here."""
    stored = lslora.split(adapters, config, decoder.config.parts)
    where = {"base_model": decoder.path, "task_type": "CAUSAL_LM"}
    lslora.save(folder, *stored, dialect="peft", **where)
    return logits_of(peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval())


def check_both_ways(decoder, expected, folder):
    """Loaded, merged, saved again and opened by PEFT: the same logits."""
    adapters, config = lslora.load(folder / "theirs", model=decoder)
    found = ours(decoder, adapters, config)
    np.testing.assert_allclose(found, expected, **CLOSE)
    base = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    assert np.abs(found - base).max() > 0.1
    again = saved_for_peft(decoder, adapters, config, folder / "ours")
    np.testing.assert_allclose(again, expected, **CLOSE)
    adapted = lslora.attach(decoder.apply_fn, config)
    merged = lslora.merge(adapted, decoder.params, adapters, jnp.asarray(IDS))
    logits = jax.jit(decoder.apply_fn)(merged, jnp.asarray(IDS))
    np.testing.assert_allclose(logits, expected, **CLOSE)
    return adapters, config


QUERIES = {"target_modules": ["q_proj"]}
TIE = {"ensure_weight_tying": True}
FIRST = [
    QUERIES | {"modules_to_save": ["embed_tokens"]},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"target_modules": ["embed_tokens", "q_proj"]} | TIE,
]
MORE = [
    QUERIES | {"modules_to_save": ["lm_head"]},
    QUERIES | {"modules_to_save": ["embed_tokens", "lm_head"]},
    QUERIES | {"modules_to_save": ["embed_tokens"]} | TIE,
    QUERIES | {"modules_to_save": ["lm_head"]} | TIE,
    {"target_modules": ["lm_head"]},
    {"target_modules": "model.embed_tokens", "use_rslora": True, "lora_dropout": 0.3},
    {"target_modules": ["lm_head", "o_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["lm_head", "q_proj"], "rank_pattern": {"q_proj": 1}} | TIE,
    {"target_modules": ["embed_tokens", "v_proj"], "rank_pattern": {"embed_tokens": 4}},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [*FIRST, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in MORE)],
    ids=lambda settings: "-".join(map(str, settings.values()))[:60],
)
def test_an_adapter_of_one_of_two_tied_matrices(settings, tied, tmp_path):
    _, decoder = tied
    expected = trained_by_peft(torch_model(), tmp_path / "theirs", **settings)
    adapters, config = check_both_ways(decoder, expected, tmp_path)
    assert config.ensure_weight_tying is settings.get("ensure_weight_tying", False)
    assert not (config.ensure_weight_tying and HEAD in adapters)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gemma2", "qwen2"])
def test_an_adapter_of_an_embedding_that_the_model_scales_or_beside_biases(kind, tmp_path):
    torch_model(kind).save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}
    expected = trained_by_peft(torch_model(kind), tmp_path / "theirs", **settings)
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32, remat=False)
    check_both_ways(decoder, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("equal", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_an_untied_base_keeps_both_matrices_whatever_the_adapter_asks(equal, tmp_path):
    def untied():
        model = torch_model(tie_word_embeddings=False)
        with torch.no_grad():
            if equal:
                model.lm_head.weight.copy_(model.get_input_embeddings().weight)
        return model

    untied().save_pretrained(tmp_path / "base")
    decoder = load_decoder(tmp_path / "base", dtype=jnp.float32, remat=False)
    settings = QUERIES | {"modules_to_save": ["embed_tokens"]} | TIE
    expected = trained_by_peft(untied(), tmp_path / "theirs", **settings)
    adapters, config = lslora.load(tmp_path / "theirs", model=decoder)
    np.testing.assert_allclose(ours(decoder, adapters, config), expected, **CLOSE)


def moved(adapters):
    """Adapters as after training."""
    return jax.tree.map(lambda x: x + 0.2 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), adapters)


def made(decoder, **settings):
    config = lslora.Config(rank=2, alpha=3.0, fourier_placement="none", **settings)
    inputs = jax.ShapeDtypeStruct(IDS.shape, jnp.int32)
    key = jax.random.key(0)
    return lslora.init(decoder.apply_fn, config, decoder.params, inputs, key=key), config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "tie", "saved"),
    [
        (EMBEDDING, False, {EMBEDDING}),
        pytest.param(HEAD, False, {HEAD}, marks=pytest.mark.exhaustive),
        pytest.param(f"{EMBEDDING}|{HEAD}", False, {EMBEDDING, HEAD}, marks=pytest.mark.exhaustive),
        pytest.param(HEAD, True, {EMBEDDING}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_matrix_trained_here_in_full_opens_in_peft(whole, tie, saved, tied, tmp_path):
    _, decoder = tied
    settings = {"modules_to_save": whole, "ensure_weight_tying": tie}
    adapters, config = made(decoder, target=r".*o_proj/kernel", **settings)
    assert saved == {name for name, x in adapters.items() if not isinstance(x, lslora.Adapter)}
    base = decoder.apply_fn(decoder.params, jnp.asarray(IDS))
    np.testing.assert_allclose(ours(decoder, adapters, config), base, **CLOSE)
    adapters = moved(adapters)
    expected = ours(decoder, adapters, config)
    again = saved_for_peft(decoder, adapters, config, tmp_path)
    np.testing.assert_allclose(again, expected, **CLOSE)
    loaded, read = lslora.load(tmp_path, model=decoder)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    assert read.ensure_weight_tying is tie
    by_itself, _ = lslora.load(tmp_path)  # the file says what its layers are
    jax.tree.map(np.testing.assert_array_equal, by_itself, adapters)


BOTH = "|".join((EMBEDDING, HEAD))


@pytest.mark.slow
@pytest.mark.parametrize("tie", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_adapters_of_both_tied_matrices_train_with_curvature(tie, tied):
    _, decoder = tied
    adapters, config = made(decoder, target=BOTH, ensure_weight_tying=tie)
    assert set(adapters) == ({EMBEDDING} if tie else {EMBEDDING, HEAD})
    adapted = lslora.attach(decoder.apply_fn, config)
    apply_fn = lambda adapters, ids: adapted(decoder.params, adapters, ids)
    objective = jk.Objective(apply_fn, jk.Categorical())
    batch = jnp.asarray(IDS), jnp.asarray(np.roll(IDS, -1, 1))
    stats = jk.value_grad_and_factors(objective)
    tx = jk.kfac(0.3, like=stats.factor_shapes(adapters, batch))

    @jax.jit
    def step(adapters, state):
        loss, grads, factors = stats(adapters, batch)
        updates, state = tx.update(grads, state, adapters, factors=factors)
        return jax.tree.map(jnp.add, adapters, updates), state, loss, grads, factors

    state, losses = tx.init(adapters), []
    for _ in range(4):
        adapters, state, loss, grads, factors = step(adapters, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1
    # A's rows are looked up: its input side counts the tokens, and no other row has a gradient
    name = f"{EMBEDDING}/a@embedding" if tie else f"{EMBEDDING}/a"
    counts = np.bincount(IDS.reshape(-1), minlength=31) / IDS.size
    np.testing.assert_allclose(factors[name].a, counts, atol=1e-6)
    if not tie:
        rows = np.abs(grads[EMBEDDING].a).max(1) > 0
        np.testing.assert_array_equal(rows, counts > 0)


@pytest.mark.slow
def test_a_bank_of_adapters_with_an_embedding_gives_each_row_its_own(tied):
    _, decoder = tied
    fresh, config = made(decoder, target=BOTH)
    trees = {"a": moved(fresh), "b": jax.tree.map(jnp.negative, moved(fresh))}
    bank, adapted = lslora.stack(trees), lslora.attach(decoder.apply_fn, config)
    found = jax.jit(lambda i: adapted(decoder.params, bank, jnp.asarray(IDS), adapter=i))
    alone = [ours(decoder, tree, config) for tree in (*trees.values(), {})]
    for index in ([1, -1], [0, 1]):
        expected = np.stack([alone[i][row] for row, i in enumerate(index)])
        np.testing.assert_allclose(found(jnp.asarray(index)), expected, **CLOSE)


@pytest.mark.slow
def test_an_answer_is_generated_with_a_head_of_its_own(tied):
    _, decoder = tied
    adapters, config = made(decoder, target=r".*o_proj/kernel", modules_to_save=HEAD)
    adapters = adapters | {HEAD: -adapters[HEAD]}
    chosen = {"adapted": lslora.attach(decoder.apply_fn, config), "adapters": adapters}
    (new,) = generate(decoder, IDS[0].tolist(), max_new_tokens=1, **chosen)
    assert new == int(np.argmax(ours(decoder, adapters, config)[0, -1]))
    assert new != int(np.argmax(decoder.apply_fn(decoder.params, jnp.asarray(IDS))[0, -1]))


T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 1, "num_heads": 2}
SOURCE, TARGET = "encoder/embed_tokens/embedding", "decoder/embed_tokens/embedding"
PAIRS = Pairs(jnp.asarray(IDS), None, jnp.asarray(IDS[:, :4]))


def t5_model():
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    with torch.no_grad():  # as after training: logits beyond rounding
        for x in model.parameters():
            x.add_(0.1 * torch.randn(x.shape))
    return model.eval()


def t5_logits(model):
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits.numpy()


@pytest.fixture(scope="module")
def pairs_model(tmp_path_factory):
    """An encoder-decoder whose head, source and target embeddings are one matrix."""
    folder = tmp_path_factory.mktemp("t5")
    t5_model().save_pretrained(folder)
    return load_encoder_decoder(folder, dtype=jnp.float32, remat=False)


VALUES = {"target_modules": ["v"]}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        VALUES | {"modules_to_save": ["embed_tokens"]},
        *(
            pytest.param(settings, marks=pytest.mark.exhaustive)
            for settings in (
                {"target_modules": ["encoder.embed_tokens", "lm_head"]},
                VALUES | {"modules_to_save": ["lm_head"]},
                VALUES | {"modules_to_save": ["shared"]},  # which PyTorch's model does not read
                VALUES | {"modules_to_save": ["decoder.embed_tokens", "lm_head"]},
                {"target_modules": ["embed_tokens", "v"]},
            )
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values()))[:60],
)
def test_an_adapter_of_one_of_three_tied_matrices(settings, pairs_model, tmp_path):
    theirs = peft.get_peft_model(t5_model(), peft.LoraConfig(r=2, lora_alpha=3, **settings)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for x in theirs.parameters():
            if x.requires_grad:
                x.add_(0.2 * torch.randn(x.shape))
    theirs.save_pretrained(tmp_path / "theirs")
    expected = t5_logits(theirs)
    adapters, config = lslora.load(tmp_path / "theirs", model=pairs_model)
    adapted, params = lslora.attach(pairs_model.apply_fn, config), pairs_model.params
    scale = {"atol": 2e-5 * np.abs(expected).max(), "rtol": 0}
    np.testing.assert_allclose(jax.jit(adapted)(params, adapters, PAIRS), expected, **scale)
    lslora.save(tmp_path / "ours", adapters, config, dialect="peft")
    again = peft.PeftModel.from_pretrained(t5_model(), tmp_path / "ours").eval()
    np.testing.assert_allclose(t5_logits(again), expected, **scale)
    merged = lslora.merge(adapted, params, adapters, PAIRS)
    np.testing.assert_allclose(pairs_model.apply_fn(merged, PAIRS), expected, **scale)


@pytest.mark.slow
def test_a_matrix_of_three_modules_is_trained_for_all_only_on_request(pairs_model, tmp_path):
    options = {"rank": 1, "fourier_placement": "none", "target": ".*/v/kernel"}
    made = lambda **more: lslora.init(
        pairs_model.apply_fn, lslora.Config(**options, **more), pairs_model.params, PAIRS,
        key=jax.random.key(0),
    )  # fmt: skip
    whole = "shared/embedding"
    with pytest.raises(ValueError, match=rf"is shared: it is read as '{SOURCE}', '{TARGET}', 'lm_"):
        made(modules_to_save=whole)
    adapters = made(modules_to_save=whole, **TIE)
    adapters = {name: -x if name == whole else x for name, x in adapters.items()}
    config = lslora.Config(**options, modules_to_save=whole, **TIE)
    adapted = lslora.attach(pairs_model.apply_fn, config)
    other = pairs_model.params | {"shared": {"embedding": adapters[whole]}}
    expected = pairs_model.apply_fn(other, PAIRS)
    np.testing.assert_allclose(adapted(pairs_model.params, adapters, PAIRS), expected, **CLOSE)
    with pytest.raises(ValueError, match="PEFT does not read a trained 'shared' of T5"):
        lslora.save(tmp_path, adapters, config, dialect="peft")
    nonlinear = {"fourier_placement": "output"}
    for change, message in (
        (nonlinear, "ensure_weight_tying: expected plain LoRA"),
        ({}, "one adapter cannot serve encoder/embed_tokens"),
    ):
        config = lslora.Config(**options | {"target": SOURCE} | TIE | change)
        call = (pairs_model.apply_fn, config, pairs_model.params, PAIRS)
        with pytest.raises(ValueError, match=message):
            lslora.init(*call, key=jax.random.key(0))


@pytest.fixture
def folder_with(tied, tmp_path):
    """A function that writes a folder of PEFT's with other entries in its settings."""
    trained_by_peft(torch_model(), tmp_path, target_modules=["q_proj", "o_proj"])
    file = tmp_path / "adapter_config.json"
    stored = json.loads(file.read_text())

    def write(**entries):
        file.write_text(json.dumps(stored | entries))
        return tmp_path

    return write


def test_settings_that_are_no_numbers_are_named(folder_with, tied):
    for entries, message in (
        ({"lora_alpha": None}, "lora_alpha: expected a number, got None"),
        ({"lora_alpha": "16"}, "lora_alpha: expected a number, got '16'"),
        ({"r": "2"}, "r: expected a whole number, got '2'"),
        ({"r": 2.0}, "r: expected a whole number, got 2.0"),
        ({"r": True}, "r: expected a whole number, got True"),
        ({"lora_dropout": None}, "lora_dropout: expected a number, got None"),
        ({"alpha_pattern": {"q_proj": "3"}}, r"alpha_pattern\['q_proj'\]: expected a number"),
        ({"rank_pattern": {"q_proj": None}}, r"rank_pattern\['q_proj'\]: expected a whole number"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: expected an object of patterns"),
    ):
        folder = folder_with(**entries)
        for call in (lambda f: lslora.load(f, model=tied[1]), lslora.read_modules):
            with pytest.raises(ValueError, match=rf"adapter_config.json: {message}"):
                call(folder)


@pytest.mark.slow
def test_all_linear_stands_for_the_modules_of_the_file(folder_with, tied, tmp_path):
    _, decoder = tied
    expected = ours(decoder, *lslora.load(folder_with(), model=decoder))
    with pytest.raises(ValueError, match=r"it lacks \['base_model.*k_proj.lora_A"):
        lslora.load(folder_with(target_modules="all-linear"), model=decoder)
    names = ["v_proj", "k_proj", "up_proj", "down_proj", "gate_proj"]
    folder = folder_with(target_modules="All-Linear", exclude_modules=names)
    np.testing.assert_array_equal(ours(decoder, *lslora.load(folder, model=decoder)), expected)


def test_weights_in_a_pickle_are_refused_with_the_command_that_converts_them(folder_with, tied):
    folder = folder_with()
    file = folder / "adapter_model.safetensors"
    expected = lslora.load(folder, model=tied[1])[0]
    stored = __import__("safetensors.torch").torch.load_file(file)
    torch.save(stored, folder / "adapter_model.bin")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.bin is a pickle") as error:
        lslora.load(folder, model=tied[1])
    (_, _, program) = str(error.value).partition("python -c ")
    exec(program.strip('"'))  # what the message says
    jax.tree.map(np.testing.assert_array_equal, lslora.load(folder, model=tied[1])[0], expected)


def test_copies_of_a_tied_head_that_differ_are_named(tied, tmp_path):
    settings = QUERIES | {"modules_to_save": ["embed_tokens", "lm_head"]}
    trained_by_peft(torch_model(), tmp_path, **settings)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | TIE))
    with pytest.raises(ValueError, match=r"lm_head.weight' is not .*ensure_weight_tying: true"):
        lslora.load(tmp_path, model=tied[1])
    both, _ = lslora.load(tmp_path, model=tied[1], assume={"ensure_weight_tying": False})
    assert {EMBEDDING, HEAD} <= both.keys()


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # optax.adamw needs it
def test_the_plan_of_a_run_counts_the_copies_of_tied_matrices(tied):
    folder, decoder = tied
    one = decoder.params["model"]["embed_tokens"]["embedding"].nbytes
    rows = {}
    for whole, tie, copies in (
        (None, False, 0), (EMBEDDING, False, 1), (BOTH, False, 2), (BOTH, True, 1),
    ):  # fmt: skip
        chosen = {"rank": 2, "modules_to_save": whole, "ensure_weight_tying": tie}
        options = AdapterOptions(fourier_placement="none", target=".*o_proj/kernel", **chosen)
        experiment = Finetuning(model=str(folder), adapter=options, dtype="float32", max_length=16)
        plan = plan_run(
            experiment, run_shapes(experiment), device_bytes=1, options=(), compiled="none"
        )
        rows[whole, tie] = plan.now.at_once
        more = {name: nbytes - rows[None, False][name] for name, nbytes in rows[whole, tie].items()}
        moments = next(nbytes for name, nbytes in more.items() if name.startswith("optimizer"))
        assert more["parameters"] == copies * one and moments == 2 * copies * one


@pytest.mark.exhaustive
def test_adapters_of_tied_matrices_on_a_base_in_four_bits(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # NF4's blocks
    torch_model(**sizes).save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]}
    trained_by_peft(torch_model(**sizes), tmp_path / "theirs", **settings)
    options = {"dtype": jnp.float32, "remat": False}
    decoder = load_decoder(tmp_path / "base", quantize=".*_proj/kernel", **options)
    adapters, config = lslora.load(tmp_path / "theirs", model=decoder)
    adapted = jax.jit(lslora.attach(decoder.apply_fn, config))
    whole = jk.nf4.dequantize(decoder.params)
    found, expected = (adapted(p, adapters, jnp.asarray(IDS)) for p in (decoder.params, whole))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.exhaustive
def test_first_values_of_a_tied_heads_adapter_come_from_the_bases_statistics(tied):
    _, decoder = tied
    objective = jk.Objective(decoder.apply_fn, jk.Categorical())
    batch = jnp.asarray(IDS), jnp.asarray(np.roll(IDS, -1, 1))
    _, gradient, factors = jk.value_grad_and_factors(objective)(decoder.params, batch)
    config = lslora.Config(rank=2, target=BOTH, fourier_placement="none")
    call = (decoder.apply_fn, config, decoder.params, batch[0])
    eva = lslora.init(*call, key=jax.random.key(0), init="eva", factors=factors)
    top = np.linalg.eigh(factors[EMBEDDING].a)[1][:, :-3:-1]  # the head's block has the path
    np.testing.assert_allclose(np.abs(top.T @ eva[HEAD].a), np.eye(2), atol=1e-4)
    slope = lslora.init(*call, key=jax.random.key(0), init="gradient", gradient=gradient)
    matrix = gradient["model"]["embed_tokens"]["embedding"].T
    top = np.linalg.svd(matrix)[0][:, :2]
    np.testing.assert_allclose(np.abs(top.T @ slope[HEAD].a), np.eye(2), atol=1e-4)
    for adapters in (eva, slope):
        assert not np.any(adapters[EMBEDDING].a) and np.any(adapters[EMBEDDING].b)
