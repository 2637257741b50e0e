"""Accusations that came after the job's epilog: the sweep follows them up."""

from __future__ import annotations

import os

import pytest
import sweep_site
from gate_site import GONE, GateSite

from health.sweep import main

site = sweep_site.site

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@needs_root
def test_an_accusation_that_came_after_the_epilog(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    epilog([])
    site.accuse()
    site.environ(job=0)
    main([])
    main([])
    assert site.event("accusation")["result"] == "cleared"
    assert site.event("strike")["uid"] == GONE


@needs_root
def test_of_a_job_that_was_not_here_nothing_is_read(site: GateSite) -> None:
    site.accuse()
    main([])
    assert site.events("accusation", "rejected") == []


@needs_root
def test_a_late_forged_one_is_refused(site: GateSite) -> None:
    from epilog.cli import main as epilog

    site.environ(job=7)
    epilog([])
    os.chown(site.accuse(), 666, 666)
    site.environ(job=0)
    main([])
    assert site.event("rejected")["owner"] == 666
    assert site.events("strike") == []
