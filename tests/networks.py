"""Twenty networks of `keras.applications` and KerasHub, small, for checks that must not cry wolf.

    python -m tests.networks                 # all of them, float32 and float64
    python -m tests.networks float64 ViT     # some of them

prints a row a network: what the check says of `data_parallel` on two devices, and of three planted
faults. KerasHub is no dependency of tfparallel; without it, its networks are left out.
"""

import functools
import importlib.util
import sys
import time

import keras
import numpy as np

import tfparallel
from tests.planted_faults import FAULTS, data_parallel_on
from tfparallel.diagnostics import floor
from tfparallel.diagnostics.compare import TOLERANCES
from tfparallel.diagnostics.training_run import Trial, plain

DEVICES = ["CPU:0", "CPU:1"]
NUM_CLASSES = 5


def application(name, size=32, **options):
    """A network of `keras.applications` on small pictures."""

    def build():
        make = getattr(keras.applications, name)
        shape = (size, size, 3)
        return make(input_shape=shape, weights=None, classes=NUM_CLASSES, **options)

    return build, functools.partial(pictures, size)


def backbone(name, data, **options):
    """A backbone of KerasHub, its outputs averaged, with a dense layer on top."""

    def build():
        hub = importlib.import_module("keras_hub")
        body = getattr(hub.models, name)(**options)
        x = body.output
        if isinstance(x, dict):
            x = x.get("sequence_output", next(iter(x.values())))
        while len(x.shape) > 2:
            x = keras.ops.mean(x, axis=1)
        x = keras.layers.Dense(NUM_CLASSES, activation="softmax", name="head")(x)
        return keras.Model(body.input, x)

    return build, data


def pictures(size, num_examples=19):
    """Pictures of a colour pattern for each class, under noise."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, NUM_CLASSES, num_examples)
    patterns = generator.normal(size=(NUM_CLASSES, size, size, 3))
    images = patterns[labels] + generator.normal(size=(num_examples, size, size, 3))
    return images.astype("float32"), labels


def tokens(keys=("token_ids", "padding_mask"), num_examples=19):
    """Sentences whose words shift with the class."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, NUM_CLASSES, num_examples)
    words = generator.integers(0, 40, (num_examples, 8)) + labels[:, np.newaxis]
    values = {"token_ids": words, "padding_mask": np.ones_like(words)}
    values["segment_ids"] = np.zeros_like(words)
    return {key: values[key] for key in keys}, labels


_DECODER = {
    "vocabulary_size": 48, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2,
    "hidden_dim": 16, "intermediate_dim": 32,
}  # fmt: skip
_ENCODER = {
    "vocabulary_size": 48, "num_layers": 2, "num_heads": 4, "hidden_dim": 16,
    "intermediate_dim": 32,
}  # fmt: skip
_RESNET = {
    "input_conv_filters": [64], "input_conv_kernel_sizes": [3], "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1], "stackwise_num_strides": [1, 2], "image_shape": (32, 32, 3),
}  # fmt: skip
small_pictures = functools.partial(pictures, 32)

NETWORKS = {
    "MobileNet": application("MobileNet", alpha=0.25),
    "MobileNetV2": application("MobileNetV2", alpha=0.35),
    "MobileNetV3Small": application("MobileNetV3Small", alpha=0.75),
    "VGG16": application("VGG16"),
    "ResNet50": application("ResNet50"),
    "ResNet50V2": application("ResNet50V2"),
    "DenseNet121": application("DenseNet121"),
    "EfficientNetB0": application("EfficientNetB0"),
    "EfficientNetV2B0": application("EfficientNetV2B0"),
    "NASNetMobile": application("NASNetMobile"),
    "Xception": application("Xception", 71),
    "HubLlama": backbone("LlamaBackbone", tokens, **_DECODER),
    "HubMistral": backbone("MistralBackbone", tokens, **_DECODER),
    "HubQwen": backbone("QwenBackbone", tokens, **_DECODER),
    "HubGemma": backbone("GemmaBackbone", tokens, **_DECODER, head_dim=4),
    "HubPhi3": backbone("Phi3Backbone", tokens, **_DECODER),
    "HubRoformer": backbone(
        "RoformerV2Backbone", functools.partial(tokens, ("token_ids", "segment_ids")), **_ENCODER,
        head_size=4,
    ),
    "HubResNet": backbone("ResNetBackbone", small_pictures, **_RESNET, block_type="basic_block"),
    "HubResNetV2": backbone(
        "ResNetBackbone", small_pictures, **_RESNET, block_type="bottleneck_block",
        use_pre_activation=True,
    ),
    "HubVGG": backbone(
        "VGGBackbone", small_pictures, stackwise_num_repeats=[1, 1], stackwise_num_filters=[8, 16],
        image_shape=(32, 32, 3),
    ),
}  # fmt: skip


def compile_model(model):
    # Without a trace, which costs more than the steps.
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)


def verdicts(name: str, dtype: str, faults=FAULTS) -> dict[str, bool]:
    """Returns whether the form passes and each fault fails, as `check_parity` judges them.

    One device is trained once for all of them: two steps, of 7 examples and of 12.
    """
    build, data = NETWORKS[name]
    x, y = data()
    batches = [(keras.tree.map_structure(lambda a, r=r: a[r], x), y[r]) for r in _ROWS]
    trial = Trial(build, compile_model, batches, seed=7)
    single = trial.run(plain)
    moves = [units for units in floor.MULTIPLES if units != floor.FINER]
    floors = {}

    def passes(form):
        deviation = floor.deviation(single, trial.run(form))
        for units in moves:
            if units not in floors:
                floors[units] = floor.deviation(single, trial.run(plain, moved_by=units))
            within = {n: floors[n] for n in moves if n <= units}
            if not floor.compare(single, deviation, within, TOLERANCES[dtype]).failed:
                return True
        return False

    result = {"passes": passes(data_parallel_on(DEVICES))}
    return result | {fault: not passes(make(DEVICES)) for fault, make in faults.items()}


_ROWS = (slice(0, 7), slice(7, 19))


def main(arguments):
    """Prints the table."""
    tfparallel.devices.split_cpu(len(DEVICES))
    dtypes = [a for a in arguments if a in TOLERANCES] or ["float32", "float64"]
    names = [a for a in arguments if a in NETWORKS] or list(NETWORKS)
    if importlib.util.find_spec("keras_hub") is None:
        names = [name for name in names if not name.startswith("Hub")]
    for dtype in dtypes:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        for name in names:
            started = time.perf_counter()
            try:
                results = verdicts(name, dtype)
            except Exception as error:
                print(f"{dtype} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            row = ", ".join(f"{what} {'yes' if ok else 'NO'}" for what, ok in results.items())
            seconds = time.perf_counter() - started
            print(f"{dtype} {name}: {row} ({seconds:.0f} s)", flush=True)
            keras.backend.clear_session()


if __name__ == "__main__":
    main(sys.argv[1:])
