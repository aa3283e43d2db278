{{/* The Serve config: the application with its arguments as given, plus where its secrets lie. */}}
{{- define "replayssm.serveConfig" -}}
{{- $args := deepCopy .Values.config -}}
{{- if $args.worker.autoscaling -}}
{{- $_ := unset $args.worker "replicas" -}}
{{- end -}}
{{- range $key, $entry := include "replayssm.authFiles" . | fromYaml -}}
{{- $_ := set $args.api $key (printf "%s/%s" (include "replayssm.authDir" $) $entry) -}}
{{- end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.serve.port }}
logging_config:
  encoding: JSON
  log_level: {{ .Values.serve.logLevel }}
  enable_access_log: {{ .Values.serve.accessLog }}
applications:
- name: {{ include "replayssm.fullname" . }}
  route_prefix: /
  import_path: actors.app:build_app
  args:
    {{- toYaml $args | nindent 4 }}
  {{- if include "replayssm.routerOnHead" . }}
  deployments:
  - name: Router
    ray_actor_options:
      num_cpus: 0
      resources: {REPLAYSSM_ROUTER: 1}
  {{- end }}
{{- end -}}
