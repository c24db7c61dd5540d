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


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([4, 1]), r"labels must be 0..3 or -1, got \[1, 4\]"),
        (torch.tensor([-2, 1]), r"labels must be 0..3 or -1, got \[-2, 1\]"),
        (torch.tensor([1]), r"one per image, \(2,\), got \(1,\) of torch.int64"),
        (torch.tensor([1.0, 2.0]), r"got \(2,\) of torch.float32; use int64"),
        ((torch.ones(2, 3), torch.ones(2)), r"one tensor \(2,\), got tuple"),
    ],
)
def test_what_is_no_label_is_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        condition_for([0, 1], labels, LABELS)


def test_a_model_without_labels_takes_none_for_an_answer():
    assert condition_for([0, 1], None, None) is None
    assert condition_for([0, 1], torch.tensor([-1, -1]), None) is None
    with pytest.raises(ValueError, match=r"labels must be -1, without num_classes, got \[0, 3\]"):
        condition_for([0, 1], torch.tensor([0, 3]), None)
    with pytest.raises(ValueError, match="at least one seed"):
        condition_for([], None, LABELS)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thikc seven", "'thikc' is not in the vocabulary; the nearest is 'thick'"),
        ("thin thin thin seven", "a text may have 3 words, got 4 in 'thin thin.*': shorten it, or"),
    ],
)
def test_a_text_beyond_the_vocabulary_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        WORDS.encode(text)
    with pytest.raises(ValueError, match=message):
        Words(WORDS.vocabulary, 3, ("thin", text))


@pytest.mark.parametrize(
    ("vocabulary", "got"),
    [
        ((), "none"),
        (("a", "B"), r"\['B'\]"),
        (("a", "a", ""), r"\['', 'a'\]"),
    ],
)
def test_a_vocabulary_that_no_text_could_use_is_refused(vocabulary, got):
    with pytest.raises(ValueError, match=f"different words in lower case.* got {got}: change the"):
        Words(vocabulary, 2)


@pytest.mark.parametrize(
    ("condition", "got"),
    [
        (torch.zeros(2, 4).long(), r"torch.int64 \(2, 4\)"),
        (torch.zeros(2, 3), r"torch.float32 \(2, 3\)"),
        (torch.full((2, 3), 3), r"torch.int64 \(2, 3\) with 3"),
        (torch.full((2, 3), -2), r"torch.int64 \(2, 3\) with -2"),
        ((torch.zeros(2, 3).long(),), r"\(torch.int64 \(2, 3\)\)"),
        ("thin seven", "str"),
    ],
)
def test_what_are_no_words_is_refused(condition, got):
    rule = rf"ids \(2, 3\) int64 in -1\.\.2, got {got}; `encode` makes them of a text"
    with pytest.raises(ValueError, match=rule):
        condition_for([0, 1], condition, WORDS)


def test_words_are_accepted():
    words = torch.tensor([[0, 2, -1], [-1, -1, -1]])
    assert condition_for([0, 1], words, WORDS) is words
    assert torch.equal(condition_for([0], None, WORDS), WORDS.encode("thin seven")[None])


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


@pytest.mark.parametrize(
    ("condition", "got"),
    [
        (torch.zeros(2, 4, 5), r"torch.float32 \(2, 4, 5\)"),
        (embedded(2, (3, 5)), r"\(torch.float32 \(2, 3, 5\), torch.bool \(2, 3\)\)"),
        (embedded(2, (4, 5))[:1], r"\(torch.float32 \(2, 4, 5\)\)"),
        ((torch.zeros(2, 4, 5), torch.zeros(2, 4)), "torch.float32 .*, torch.float32 "),
        ((torch.zeros(2, 4, 5).long(), torch.zeros(2, 4).bool()), "torch.int64 .*, torch.bool "),
        ((torch.zeros(2, 4, 5), torch.zeros(2).bool()), r", torch.bool \(2,\)"),
    ],
)
def test_what_are_no_embeddings_is_refused(condition, got):
    rule = r"pair \(values \(2, 4, 5\) float, there \(2, 4\) bool\), got "
    with pytest.raises(ValueError, match=rf"embeddings must be a {rule}.*{got}.*: change them, or"):
        condition_for([0, 1], condition, Embeddings((4, 5)))


def test_examples_and_a_null_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"examples must be a pair \(values \(3, 4, 5\) float"):
        Embeddings((4, 5), examples=embedded(3, (5,)))
    null = tuple(part[0] for part in embedded(1, (3, 5)))
    with pytest.raises(ValueError, match=r"null_embedding must be .*torch.bool \(1, 3\)\): change"):
        Embeddings((4, 5), null_embedding=null)
