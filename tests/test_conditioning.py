import pytest
import torch

from lit_diffusion.conditioning import ClassLabels, Embeddings, Words, condition_for

LABELS = ClassLabels(4)


def test_dropped_labels_are_minus_one_and_the_others_stay():
    labels, drop = torch.arange(4), torch.tensor([True, False, True, False])
    assert LABELS.drop(labels, drop).tolist() == [-1, 1, -1, 3]
    assert labels.tolist() == [0, 1, 2, 3]
    assert LABELS.null(labels).tolist() == [-1] * 4
    assert LABELS.null(labels).dtype == LABELS.drop(labels, drop).dtype == torch.int64


def test_classes_of_samples_are_the_seeds_modulo_their_number():
    assert LABELS.for_seeds(range(6)).tolist() == [0, 1, 2, 3, 0, 1]
    assert condition_for([5, 2], None, LABELS).tolist() == [1, 2]


def test_labels_of_the_user_win():
    labels = torch.tensor([3, -1])
    assert condition_for([0, 1], labels, LABELS) is labels


# Words

WORDS = Words(("thin", "thick", "seven"), length=3, texts=("thin seven", "Thick"))


def test_a_text_is_the_ids_of_its_words_then_minus_one():
    assert WORDS.encode(" Thick\tSEVEN ").tolist() == [1, 2, -1]
    assert WORDS.encode("seven thick thick").tolist() == [2, 1, 1]
    assert WORDS.encode("").tolist() == [-1, -1, -1]
    assert WORDS.encode("thin").dtype == torch.int64
    assert WORDS.num_words == 3


def test_dropped_words_are_minus_one_and_the_others_stay():
    words = torch.stack([WORDS.encode(text) for text in ("thin", "thick seven", "seven")])
    dropped = WORDS.drop(words, torch.tensor([False, True, False]))
    assert dropped.tolist() == [[0, -1, -1], [-1, -1, -1], [2, -1, -1]]
    assert words[1].tolist() == [1, 2, -1]
    assert torch.equal(WORDS.null(words), torch.full((3, 3), -1))


def test_seeds_take_the_texts_in_turn_and_none_without():
    assert WORDS.for_seeds([3, 0]).tolist() == [[1, -1, -1], [0, 2, -1]]
    assert Words(("a",), 2).for_seeds([3, 0]).tolist() == [[-1, -1], [-1, -1]]


# Embeddings

SHAPES = [(5,), (4, 5)]  # a vector; tokens


def embedded(num, shape):
    generator = torch.Generator().manual_seed(num)
    values = torch.randn(num, *shape, generator=generator)
    return values, torch.rand(num, *shape[:-1], generator=generator) < 0.6


@pytest.mark.parametrize("shape", SHAPES)
def test_dropped_embeddings_are_not_there_and_the_others_stay(shape):
    (values, there), drop = embedded(3, shape), torch.tensor([False, True, False])
    dropped_values, dropped_there = Embeddings(shape).drop((values, there), drop)
    assert torch.equal(dropped_values, values)
    assert torch.equal(dropped_there[~drop], there[~drop])
    assert not dropped_there[drop].any()
    assert not Embeddings(shape).null((values, there))[1].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_null_embedding_takes_the_place_of_what_is_dropped(shape):
    (values, there), (null, null_there) = embedded(3, shape), embedded(1, shape)
    values[1], drop = torch.nan, torch.tensor([False, True, False])
    null_there = torch.ones_like(null_there)
    conditioning = Embeddings(shape, null_embedding=(null[0].double(), null_there[0]))
    dropped_values, dropped_there = conditioning.drop((values, there), drop)
    assert torch.equal(dropped_values[drop], null)
    assert torch.equal(dropped_values[~drop], values[~drop])
    assert dropped_values.dtype == values.dtype
    assert torch.equal(dropped_there[~drop], there[~drop])
    assert dropped_there[drop].all()
    for condition in (conditioning.null((values, there)), conditioning.for_seeds(range(3))):
        assert torch.equal(condition[0], null.expand(3, *shape))
        assert condition[1].all()
        conditioning.check(condition, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_seeds_take_the_examples_in_turn_and_none_without(shape):
    examples = embedded(3, shape)
    condition = Embeddings(shape, examples).for_seeds([4, 0])
    assert all(torch.equal(c, e[[1, 0]]) for c, e in zip(condition, examples, strict=True))
    values, there = none = Embeddings(shape).for_seeds([4, 0])
    assert (values.shape, there.shape) == ((2, *shape), (2, *shape[:-1]))
    assert not there.any()
    Embeddings(shape).check(none, 2)


# Refusals

VALUES, THERE = torch.zeros(2, 4, 5), torch.zeros(2, 4).bool()
EMBEDDINGS = Embeddings((4, 5))
PAIR = r"embeddings must be a pair \(values \(2, 4, 5\) float, present \(2, 4\) bool\), got .*"
IDS = r"ids \(2, 3\) int64 in -1\.\.2, got "


@pytest.mark.parametrize(
    ("conditioning", "condition", "message"),
    [
        (
            None,
            torch.tensor([0, 3]),
            r"labels must be -1, because num_classes is not set, got \[0, 3\]",
        ),
        (LABELS, torch.tensor([4, 1]), r"labels must be 0..3 or -1, got \[1, 4\]"),
        (LABELS, torch.tensor([-2, 1]), r"labels must be 0..3 or -1, got \[-2, 1\]"),
        (LABELS, torch.tensor([1]), r"one per image, \(2,\), got \(1,\) of torch.int64"),
        (LABELS, torch.tensor([1.0, 2.0]), r"got \(2,\) of torch.float32; use int64"),
        (LABELS, (VALUES, THERE), r"one tensor \(2,\), got tuple"),
        (WORDS, torch.zeros(2, 4).long(), rf"{IDS}torch.int64 \(2, 4\)"),
        (WORDS, torch.zeros(2, 3), rf"{IDS}torch.float32 \(2, 3\)"),
        (WORDS, torch.full((2, 3), 3), rf"{IDS}torch.int64 \(2, 3\) with 3"),
        (WORDS, torch.full((2, 3), -2), rf"{IDS}torch.int64 \(2, 3\) with -2"),
        (WORDS, (torch.zeros(2, 3).long(),), rf"{IDS}\(torch.int64 \(2, 3\)\)"),
        (WORDS, "thin seven", f"{IDS}str; use `encode` to convert"),
        (EMBEDDINGS, VALUES, rf"{PAIR}torch.float32 \(2, 4, 5\)"),
        (EMBEDDINGS, (VALUES[:, :3], THERE[:, :3]), rf"{PAIR}\(2, 3, 5\), torch.bool \(2, 3\)"),
        (EMBEDDINGS, (VALUES,), rf"{PAIR}\(torch.float32 \(2, 4, 5\)\)"),
        (EMBEDDINGS, (VALUES, THERE.float()), f"{PAIR}torch.float32 .*, torch.float32 "),
        (EMBEDDINGS, (VALUES.long(), THERE), f"{PAIR}torch.int64 .*, torch.bool "),
        (EMBEDDINGS, (VALUES, THERE[:, 0]), rf"{PAIR}, torch.bool \(2,\)"),
    ],
)
def test_conditions_of_another_kind_or_shape_are_refused(conditioning, condition, message):
    with pytest.raises(ValueError, match=message):
        condition_for([0, 1], condition, conditioning)


LOWER = "different words in lower case.* got "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: condition_for([], None, LABELS), "at least one seed"),
        (lambda: WORDS.encode("thikc seven"), "'thikc' is not in the vocabulary; .* is 'thick'"),
        (
            lambda: WORDS.encode("thin thin thin thin"),
            "at most 3 words, got 4 in 'thin thin.*'",
        ),
        (lambda: Words(WORDS.vocabulary, 3, ("thin", "x")), "'x' is not in the vocabulary"),
        (lambda: Words((), 2), f"{LOWER}no words"),
        (lambda: Words(("a",), 0), "length must be above 0"),
        (lambda: Words(("a b", "B"), 2), rf"{LOWER}\['a b', 'B'\]"),
        (lambda: Words(("a", "a", ""), 2), rf"{LOWER}\['', 'a'\]"),
        (lambda: Embeddings((4, 5), embedded(3, (5,))), r"examples must be .* \(3, 4, 5\) float"),
        (
            lambda: Embeddings((4, 5), null_embedding=(VALUES[0, :3], THERE[0, :3])),
            r"null_embedding must be .*torch.bool \(1, 3\)\): change",
        ),
    ],
)
def test_texts_vocabularies_and_examples_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
