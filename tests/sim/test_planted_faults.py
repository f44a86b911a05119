"""Every planted fault is caught by a case of its family; see :mod:`mutant_family`."""

import pytest
from families import FAMILIES
from mutant_family import kill_map


def each(what, names_of, mark):
    """Parameters ``family`` and ``what``: a name of ``names_of(family)`` at a time."""
    params = [
        pytest.param(family, name, id=f"{family.name}-{name}".replace(" ", "-"), marks=mark)
        for family in FAMILIES
        for name in names_of(family)
    ]
    return pytest.mark.parametrize(("family", what), params)


@each("case", lambda family: family.cases, pytest.mark.case)
def test_case_passes(family, case):
    """On the kernels as they are. In every suite: a case that fails kills everything."""
    family.passes(case)


@each("fault", lambda family: family.harmful, pytest.mark.mutant)
def test_fault_is_caught(family, fault, request):
    """By the case of the kill map; with ``--derive`` by the cheapest case there is."""
    derive = request.config.option.derive
    case = family.cheapest_killer(fault) if derive else family.assert_killed(fault)
    killed = family.name, len(family.harmful), fault, case
    request.node.user_properties.append(("killed", killed))


@each("fault", lambda family: family.survivors, pytest.mark.survivor)
def test_fault_survives(family, fault):
    """If this fails, a case kills it after all: strike it off."""
    family.assert_survives(fault)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_fault_is_planted_twice(family):
    assert family.twins() == []


def test_the_kill_map_has_every_fault():
    """And no other: ``--derive`` writes it anew."""
    assert set(kill_map()) == {family.name for family in FAMILIES}
    for family in FAMILIES:
        named = kill_map()[family.name]
        assert set(named) == set(family.harmful), family.name
        assert set(named.values()) <= set(family.cases), family.name
