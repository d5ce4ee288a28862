r"""Segment gray and white matter in slices of a brain with a U-Net.

Parallelism: `model` (also checked: `tensor` with `--convolutions=height`).
Why: activations of large images fill a device; skip connections go to the device that reads them.

    tfparallel check models/segmentation.py --parallel=model --num_devices=2 --steps=5 \
        --global_batch_size=8 --precision=float64
    tfparallel check models/segmentation.py --parallel=tensor --num_devices=2 --steps=5 \
        --convolutions=height --global_batch_size=8 --precision=float64
    tfparallel train models/segmentation.py --parallel=model --num_devices=2 \
        --global_batch_size=8

The data are real, and small: the MNI template, magnetic resonance images of 152 people, averaged,
at 1 mm, with maps of both tissues. The package nilearn ships them. An average is too clean to be
hard, so the noise of a fast scan is added: each slice is the magnitude of a complex image with
Gaussian noise. The model is trained on slices of the brain's back, and validated on its front. Run
`check` in float64, because batch normalization amplifies float32 rounding.

References:
    Fonov et al. Unbiased average age-appropriate atlases for pediatric studies. NeuroImage 54(1),
    2011.
    Gudbjartsson, Patz. The Rician distribution of noisy MRI data. Magnetic Resonance in Medicine
    34(6), 1995.
    Ronneberger, Fischer, Brox. U-Net: convolutional networks for biomedical image segmentation.
    MICCAI 2015.
"""

import importlib.resources

import keras
import numpy as np

EPOCHS = 6
HEIGHT, WIDTH = 160, 144
TISSUES = ("gm", "wm")  # Gray and white matter; class 0 is what is neither.
# The slices of the template with brain in them, from back to front, and what is cut out of each.
SLICES, FIRST_TO_VALIDATE = slice(28, 208), 120
ACROSS, UP = slice(26, 26 + WIDTH), slice(0, HEIGHT)
NOISE = 0.15  # Its standard deviation; white matter is about 0.9.
FILTERS = (8, 16, 32)


def build_model():
    """Returns a model that outputs three logits for each pixel: neither tissue, gray, white."""
    inputs = keras.Input((HEIGHT, WIDTH, 1), name="slice")
    x, skips = inputs, []
    for level, filters in enumerate(FILTERS[:-1], start=1):
        x = convolutions(x, filters, name=f"down{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(2, name=f"down{level}_pool")(x)
    x = convolutions(x, FILTERS[-1], name="bottom")
    for level in range(len(skips), 0, -1):
        x = keras.layers.UpSampling2D(2, name=f"up{level}_resize")(x)
        x = keras.layers.Concatenate(name=f"up{level}_skip")([skips[level - 1], x])
        x = convolutions(x, FILTERS[level - 1], name=f"up{level}")
    outputs = keras.layers.Conv2D(1 + len(TISSUES), 1, name="logits")(x)
    return keras.Model(inputs, outputs, name="segmentation")


def convolutions(x, filters, name):
    """Convolves `x`, `(batch, height, width, channels)`, twice, with normalization and ReLU."""
    for number in (1, 2):
        # Without bias: the normalization behind it would take it out again.
        x = keras.layers.Conv2D(
            filters,
            3,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
            name=f"{name}_conv{number}",
        )(x)
        # An epoch is 15 steps, too few for averages of the default momentum, 0.99.
        x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm{number}")(x)
        x = keras.layers.ReLU(name=f"{name}_relu{number}")(x)
    return x


def compile_model(model):
    """Compiles the net with Adam, cross-entropy of each pixel and the tissues' mean IoU."""
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.IoU(3, target_class_ids=[1, 2], sparse_y_pred=False, name="iou")],
    )


def load_data():
    """Returns (train, validation), each `(slices, tissues)`.

    Slices `(examples, 160, 144, 1)` in float32, the top of the head first. Tissues `(examples, 160,
    144)` in int32: 1 for gray matter, 2 for white, 0 for neither.
    """
    random = np.random.default_rng(0)
    clean = read_slices("t1")[..., np.newaxis] / 255
    noise = random.normal(scale=NOISE, size=(2, *clean.shape))
    slices = np.hypot(clean + noise[0], noise[1]).astype("float32")
    gray, white = (read_slices(tissue) > 127 for tissue in TISSUES)
    tissues = np.where(white, 2, np.where(gray, 1, 0)).astype("int32")
    order = random.permutation(FIRST_TO_VALIDATE)
    train = slices[order], tissues[order]
    return train, (slices[FIRST_TO_VALIDATE:], tissues[FIRST_TO_VALIDATE:])


def read_slices(name):
    """Returns slices from ear to ear of one image of the template, `(180, 160, 144)` in uint8."""
    try:
        import nibabel

        files = importlib.resources.files("nilearn")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The images come with the package nilearn, and nibabel reads them. Received: no "
            f"package {error.name}. pip install 'tfparallel[models]'"
        ) from None
    image = f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    with importlib.resources.as_file(files / "datasets" / "data" / image) as path:
        voxels = np.asarray(nibabel.load(path).dataobj)  # Left to right, back to front, upwards.
    return voxels[ACROSS, SLICES, UP].transpose(1, 2, 0)[:, ::-1]
