import numpy as np
import pytest

from jaxkfac.jobs.data.few_shot import ClassImages, Episodes, split_classes


def numbered(sizes):
    """Image ``i`` of class ``c`` is gray ``20 c + i``."""
    return ClassImages(
        "made here",
        {
            name: np.broadcast_to(
                (20 * c + np.arange(n, dtype=np.uint8))[:, None, None, None], (n, 2, 2, 1)
            )
            for c, (name, n) in enumerate(sizes.items())
        },
    )


def gray(images):
    """What ``numbered`` had, of images scaled to [-1, 1]."""
    return np.rint((images[..., 0, 0, 0] + 1) * 127.5).astype(int)


SIX = numbered(dict.fromkeys("abcdef", 9))


def test_queries_are_other_images_of_the_support_s_classes():
    episodes = Episodes(SIX, n_way=4, k_shot=2, n_query=3, seed=1)
    for number in range(20):
        support, query, targets = (part[0] for part in episodes.at(number))
        classes = gray(support) // 20
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0])) == 4
        np.testing.assert_array_equal(gray(query) // 20, classes[targets, 0])
        np.testing.assert_array_equal(targets, np.repeat(np.arange(4), 3))
        seen = [*gray(support).ravel(), *gray(query)]
        assert len(set(seen)) == len(seen)


def test_an_episode_is_a_function_of_seed_and_number_and_no_other():
    episodes = Episodes(SIX, n_way=3, k_shot=1, n_query=2, seed=5)
    one, many = episodes.at(7), episodes.at(5, 4)
    for alone, together in zip(one, many):
        np.testing.assert_array_equal(alone[0], together[2])
    other = Episodes(SIX, n_way=3, k_shot=1, n_query=2, seed=6)
    assert any((one.support != x.at(n).support).any() for x, n in ((episodes, 8), (other, 7)))
    drawn = {tuple(gray(episodes.at(n).support).ravel()) for n in range(30)}
    assert len(drawn) > 25


def test_every_class_and_image_comes_up():
    episodes = Episodes(SIX, n_way=3, k_shot=1, n_query=1)
    assert len({g for n in range(300) for g in gray(episodes.at(n).support).ravel()}) == 6 * 9


def test_what_cannot_be_drawn_is_refused_by_name():
    with pytest.raises(ValueError, match="n_way=7: made here has 6 classes"):
        Episodes(SIX, n_way=7)
    few = numbered({"a": 9, "b": 3, "c": 4})
    with pytest.raises(
        ValueError, match=r"class 'b' has 3, 'c' has 4, but .* needs 5 .*2 to .*3 to"
    ):
        Episodes(few, n_way=2, k_shot=2, n_query=3)
    with pytest.raises(ValueError, match="k_shot=0"):
        Episodes(SIX, k_shot=0)
    with pytest.raises(ValueError, match="number=-1"):
        Episodes(SIX, n_way=2, k_shot=1, n_query=1).at(-1)


def test_classes_are_divided_without_rest_and_by_seed():
    parts = [set(split.images) for split in split_classes(SIX, seed=2)]
    assert [len(part) for part in parts] == [4, 1, 1] and set.union(*parts) == set("abcdef")
    assert {tuple(split_classes(SIX, seed=s).novel.images) for s in range(20)} > {("a",)}
    with pytest.raises(ValueError, match="made here has 2 classes"):
        split_classes(numbered({"a": 1, "b": 1}))
    with pytest.raises(ValueError, match="fractions"):
        split_classes(SIX, fractions=(0.0, 0.2))
