"""Who reaches what: ports, probes, network policies and routes."""

from __future__ import annotations

import pytest

from tests.helm.chart import CI_FILES, Manifest, cluster, container, manifests, one, pods, serve_config


def port_names(pod: Manifest) -> dict[str, int]:
    return {port['name']: port['containerPort'] for port in container(pod)['ports']}


def allowed_ports(policy: Manifest) -> set[int]:
    return {port['port'] for rule in policy['spec']['ingress'] for port in rule.get('ports', ())}


@pytest.mark.parametrize('feature', CI_FILES)
def test_ports_are_those_of_the_configuration(feature: str) -> None:
    config = serve_config(feature)
    metrics = config['applications'][0]['args']['metrics']
    expected = {config['http_options']['port'], 8080, 8265, *({metrics['port']} if metrics.get('port') else ())}
    for pod in pods(feature).values():
        ports = port_names(pod)
        assert ports['serve'] == config['http_options']['port']
        assert ports.get('exporter') == metrics.get('port')
    assert metrics['host'] == '0.0.0.0'
    for manifest in manifests(feature):
        if manifest['kind'] == 'NetworkPolicy':
            assert allowed_ports(manifest) == expected


def test_ray_itself_is_open_to_its_own_pods_and_the_operator_only() -> None:
    policy = one('NetworkPolicy')['spec']
    for rule in policy['ingress']:
        ports = {port['port'] for port in rule.get('ports', ())}
        if ports & {8265} or not ports:
            assert rule['from']
            assert all(peer['podSelector']['matchLabels'] for peer in rule['from'])
    assert cluster()['authOptions'] == {'mode': 'token'}


def test_outgoing_traffic_is_left_alone_unless_told_otherwise() -> None:
    assert one('NetworkPolicy')['spec']['policyTypes'] == ['Ingress']
    restricted = one('NetworkPolicy', 'network-policy')['spec']
    assert restricted['policyTypes'] == ['Ingress', 'Egress']
    assert len(restricted['egress']) == 3


@pytest.mark.parametrize('feature', ['ingress', 'http-route'])
def test_routes_lead_to_the_service_that_kuberay_makes(feature: str) -> None:
    if feature == 'ingress':
        (rule,) = one('Ingress', feature)['spec']['rules']
        service = rule['http']['paths'][0]['backend']['service']
        found = service['name'], service['port']['number']
    else:
        route = one('HTTPRoute', feature)
        assert route['apiVersion'] == 'gateway.networking.k8s.io/v1'
        assert set(route['spec']) == {'parentRefs', 'hostnames', 'rules'}
        (rule,) = route['spec']['rules']
        (backend,) = rule['backendRefs']
        found = backend['name'], backend['port']
    assert found == ('llm-replayssm-serve-svc', 8000)


@pytest.mark.parametrize('feature', CI_FILES)
def test_probes_need_no_program_in_the_image(feature: str) -> None:
    for role, pod in pods(feature).items():
        for probe in ('startupProbe', 'livenessProbe', 'readinessProbe'):
            action = container(pod)[probe]['httpGet']
            ready_worker = (role, probe) == ('worker', 'readinessProbe')
            assert action['path'] == ('/-/healthz' if ready_worker else '/api/healthz')
            assert action['port'] in port_names(pod) or action['port'] == 52365
