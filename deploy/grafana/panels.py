"""Panels and dashboards in the style of this project: a unit and a description each, filtered by variables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

MODEL = '{model_name=~"$model_name"}'
"""Selector of the chosen models' series."""
ENGINE = '{model_name=~"$model_name", replica=~"$replica"}'
"""Selector of the chosen replicas' series."""
DOCS = 'docs'
"""Where the documentation is: a folder of the repository, until somebody sets the dashboards' variable `docs`."""

_SOURCE = DataSourceRef(type_val='prometheus', uid='${datasource}')
_TAG = 'replayssm'
_HEIGHT = 8
_REF_IDS = 'ABCDEF'
_STOCK_COLOR = {'mode': 'fixed', 'fixedColor': 'red'}

Panel = timeseries.Panel | stat.Panel | bargauge.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series; `dashed` marks a reference that others compare with."""

    expr: str
    legend: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


def rate(counter: str, by: str = '', selector: str = MODEL) -> str:
    """Return the rate of a counter that each model, or replica, has once."""
    grouping = f' by ({by})' if by else ''
    return f'sum{grouping} (rate({counter}{selector}[$__rate_interval]))'


def engine_rate(counter: str, by: str = '') -> str:
    """Return the rate of a counter that each replica has once, or of bytes that ranks share."""
    return rate(counter, by, ENGINE)


def rank_rate(counter: str) -> str:
    """Return the rate of a counter that all ranks of a replica count alike."""
    return f'sum (max by (model_name, replica) (rate({counter}{ENGINE}[$__rate_interval])))'


def quantile(q: float, histogram: str, selector: str = MODEL) -> str:
    """Return a quantile of a histogram over all series."""
    return f'histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{selector}[$__rate_interval])))'


def lines(title: str, description: str, unit: str, *queries: Query, stacked: bool = False, width: int = 12) -> Panel:
    """Return curves over time; with `stacked` their areas add up, the dashed ones aside."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(_SOURCE)
    # Zero is where the axis begins, unless something lies below it, as savings may.
    panel = panel.height(_HEIGHT).span(width).axis_soft_min(0)
    panel = panel.show_points(VisibilityMode.NEVER).fill_opacity(30 if stacked else 8)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group('held'))
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        panel = panel.with_target(_target(query, ref_id).range())
        if query.dashed:
            panel = panel.override_by_query(
                ref_id,
                [
                    DynamicConfigValue('custom.lineStyle', {'fill': 'dash', 'dash': [10, 10]}),
                    DynamicConfigValue('custom.stacking', {'mode': 'none', 'group': 'reference'}),
                    DynamicConfigValue('custom.fillOpacity', 0),
                    DynamicConfigValue('color', _STOCK_COLOR),
                ],
            )
    return panel


def number(title: str, description: str, unit: str, query: Query, width: int = 4) -> Panel:
    """Return the latest value in large print."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(_SOURCE)
    panel = panel.height(_HEIGHT // 2).span(width)
    panel = panel.graph_mode(BigValueGraphMode.AREA).color_mode(BigValueColorMode.VALUE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(['lastNotNull']).values(False))
    return panel.with_target(_target(query, 'A').range())


def bars(title: str, description: str, unit: str, *queries: Query, width: int = 12) -> Panel:
    """Return horizontal bars of the latest values."""
    panel = bargauge.Panel().title(title).description(description).unit(unit).datasource(_SOURCE)
    panel = panel.height(_HEIGHT).span(width).min(0)
    panel = panel.orientation(VizOrientation.HORIZONTAL).display_mode(BarGaugeDisplayMode.BASIC).show_unfilled(True)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(['lastNotNull']).values(False))
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        panel = panel.with_target(_target(query, ref_id).instant())
    return panel


def make_dashboard(uid: str, title: str, description: str, docs: str, rows: Sequence[Row]) -> dashboard.Dashboard:
    """Return a dashboard with the variables that its panels' selectors use.

    Args:
        docs: page and anchor below the documentation's folder that explains the dashboard.
    """
    made = dashboard.Dashboard(f'ReplaySSM / {title}').uid(uid).description(description).tags([_TAG])
    made = made.time('now-1h', 'now').refresh('30s').timezone('browser').tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.readonly().with_variable(
        dashboard.DatasourceVariable('datasource').label('Data source').type('prometheus')
    )
    made = made.with_variable(
        _label_variable('model_name', 'Model', 'label_values(replayssm_requests_running, model_name)')
    )
    made = made.with_variable(
        _label_variable('replica', 'Replica', f'label_values(replayssm_worker_capacity{MODEL}, replica)')
    )
    made = made.with_variable(dashboard.ConstantVariable('docs').label('Docs').value(DOCS))
    others = dashboard.DashboardLink('ReplaySSM').type(DashboardLinkType.DASHBOARDS).tags([_TAG])
    made = made.link(others.as_dropdown(True).include_vars(True).keep_time(True))
    for name, page in (('How to read this', docs), ('Runbooks', 'en/runbooks.md')):
        link = dashboard.DashboardLink(name).type(DashboardLinkType.LINK).url(f'${{docs}}/{page}').icon('doc')
        made = made.link(link.target_blank(True))
    ids = itertools.count(1)
    for row in rows:
        made = made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made = made.with_panel(panel.id(next(ids)))
    return made


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id).datasource(_SOURCE)


def _label_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = VariableOption(selected=True, text=['All'], value=['$__all'])
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(_SOURCE).current(everything)
    variable = variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    return variable.multi(True).include_all(True).all_value('.+')
