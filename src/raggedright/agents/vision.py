"""Images in an agent's contexts: their tokens and pixels, and the fields that a row has for them.

Text and its images go through the model's own processor, which replaces each placeholder in the text by as many
placeholder tokens as the image takes. Its output is recorded as it is. Messages have their images in parts, `{"type":
"image", "image": ...}`; a text has one placeholder for each of its images.

In a run with a vision-language model every row has positions with 3 axes, rows without images included, so that all
rows have the same form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from transformers import ProcessorMixin

from raggedright.agents.tokens import Tokens, is_chat
from raggedright.sessions import SessionError
from raggedright.tensors.images import image_positions

MEDIA = "multi_modal_inputs"

Picture = Image.Image | np.ndarray | str | Path
"""An image as agents give it: Pillow's, an array [height, width, 3] of bytes, or the path of a file."""


@dataclass(frozen=True, slots=True)
class Vision:
    """A model's processor, the tokens that stand for images, and the number of patches per side of a token."""

    processor: ProcessorMixin
    image_token_id: int
    placeholder_ids: Sequence[int]
    merge_size: int

    @property
    def placeholder(self) -> str:
        """The placeholder for one image in a text."""
        return self.processor.image_token  # pyright: ignore[reportAttributeAccessIssue]

    def encoder_for(self, images: Sequence[Picture]) -> "ImageTextEncoder":
        """An encoder for a text with these images."""
        return ImageTextEncoder(self, [_opened(i, image) for i, image in enumerate(images)])

    def check_text(self, ids: Sequence[int]) -> None:
        """Refuse placeholders where no image is given."""
        for token in self.placeholder_ids:
            if token in ids:
                raise SessionError(
                    f"token {ids.index(token):,}, {token}, stands for an image and none is given; give images with "
                    "text, or messages with parts of type image"
                )

    def fields(self, ids: Sequence[int], media: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """The fields of a row in addition to its tokens."""
        row = np.array(ids, dtype=np.int64)
        grids = media["image_grid_thw"].numpy() if media else np.empty((0, 3), dtype=np.int64)
        positions = image_positions(row, grids, image_token_id=self.image_token_id, merge_size=self.merge_size)
        return {"position_ids": positions, **{f"{MEDIA}.{name}": value.numpy() for name, value in media.items()}}


class ImageTextEncoder:
    """Encodes one text with its images; afterwards `media` has their pixels and sizes."""

    def __init__(self, vision: Vision, images: list[Image.Image]) -> None:
        self._vision, self._images = vision, images
        self.media: dict[str, Tensor] = {}

    def __call__(self, text: str) -> list[int]:
        """Token ids of the text, with as many placeholders for each image as it takes."""
        vision, images = self._vision, self._images
        if (places := text.count(vision.placeholder)) != len(images):
            raise SessionError(
                f"a text has {places:,} placeholders ({vision.placeholder}) and {len(images):,} images; they must agree"
            )
        options: dict = {"add_special_tokens": False, "return_mm_token_type_ids": False, "return_tensors": "pt"}
        try:
            made = vision.processor(text=[text], images=images, **options)
        except ValueError as error:
            cause = str(error).partition("\n")[0]
            raise SessionError(f"the processor refuses an image or its text: {cause}") from None
        self.media = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        return made["input_ids"][0].tolist()


def pictures_of(tokens: Tokens, images: Sequence[Picture]) -> list[Picture]:
    """All images of a text or of messages, in their order."""
    if not is_chat(tokens):
        return [*images]
    if images:
        raise SessionError("images are given with messages; put each in its message: {'type': 'image', 'image': ...}")
    pictures: list[Picture] = []
    for message in tokens:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                pictures.append(part.get("image"))  # pyright: ignore[reportArgumentType]: `_opened` checks it
    return pictures


def _opened(number: int, image: object) -> Image.Image:
    """An image in three channels."""
    if isinstance(image, str | Path):
        try:
            with Image.open(image) as opened:
                return opened.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise SessionError(f"image {number} cannot be read: {error}") from None
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        return Image.fromarray(image)
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    raise SessionError(
        f"image {number} is a {type(image).__name__}; give Pillow's, an array [height, width, 3] of bytes, or a path"
    )
