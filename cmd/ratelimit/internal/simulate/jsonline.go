package simulate

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// DefaultFields returns the names under which an attribute is looked for in JSON, the first that is there: those that
// Caddy, Traefik, Google Cloud and many others write. Every other attribute than these has the field of its own name.
func DefaultFields(attribute string) []string {
	switch attribute {
	case "time":
		return []string{"time", "ts", "timestamp", "@timestamp"}
	case "address":
		return []string{
			"remote_addr", "ip", "client_ip", "remote_ip", "address",
			"request.client_ip", "request.remote_ip", "ClientHost", "httpRequest.remoteIp",
		}
	case "user":
		return []string{"user", "remote_user", "user_id", "ClientUsername"}
	case "method":
		return []string{"method", "request_method", "request.method", "RequestMethod", "httpRequest.requestMethod"}
	case "path":
		return []string{"path", "url", "uri", "request_uri", "request.uri", "RequestPath", "httpRequest.requestUrl"}
	}
	return []string{attribute}
}

// jsonFields are the fields of a JSON line that are looked at, by the attribute that they hold.
type jsonFields struct {
	time, address, user, tenant, plan, method, path, route, request []fieldPath

	wanted [][]fieldPath
}

// fieldPath is the way to a field: its name, after those of the objects that it is in.
type fieldPath []string

func newJSONFields(names map[string]string, wanted []string) jsonFields {
	of := func(attribute string) (paths []fieldPath) {
		found := DefaultFields(attribute)
		if name := names[attribute]; name != "" {
			found = []string{name}
		}
		for _, name := range found {
			paths = append(paths, fieldPath{name}) // a name may have dots in it
			if strings.Contains(name, ".") {
				paths = append(paths, strings.Split(name, "."))
			}
		}
		return paths
	}
	f := jsonFields{
		time: of("time"), address: of("address"), user: of("user"), tenant: of("tenant"), plan: of("plan"),
		method: of("method"), path: of("path"), route: of("route"), request: of("request"),
	}
	for _, name := range wanted {
		f.wanted = append(f.wanted, of(name))
	}
	return f
}

var errNoObject = errors.New("it is no JSON object, or is cut off")

// parseJSON reads a line that is an object.
func (p *parser) parseJSON(line string) error {
	if trimmed := strings.TrimLeft(line, " \t"); trimmed == "" || trimmed[0] != '{' {
		return errNoObject
	}
	var object map[string]json.RawMessage
	if json.Unmarshal([]byte(line), &object) != nil {
		return errNoObject
	}
	f, r := &p.json, &p.record
	text := first(object, f.time)
	at, ok := p.clock.parseInstant(text)
	switch {
	case text == "":
		return fmt.Errorf("it has no field for the time; there may be %s", joined(f.time))
	case !ok:
		return errors.New("its time is neither RFC 3339 nor a number of seconds since 1970")
	}
	r.at = at
	r.address, r.user, r.tenant, r.plan = first(object, f.address), first(object, f.user), first(object, f.tenant), first(object, f.plan)
	r.method, r.target, r.route = first(object, f.method), first(object, f.path), first(object, f.route)
	if r.method == "" && r.target == "" {
		r.requestLine(first(object, f.request))
	}
	for i, name := range p.wanted {
		switch name {
		case "method":
			r.fields[name] = r.method
		case "path":
			r.fields[name] = pathOf(r.target)
		default:
			r.fields[name] = first(object, f.wanted[i])
		}
	}
	return nil
}

// first returns the text of the first of the fields that is there.
func first(object map[string]json.RawMessage, paths []fieldPath) string {
	for _, path := range paths {
		if value := at(object, path); value != "" {
			return value
		}
	}
	return ""
}

// at returns the text of a field: of a string, a number or a boolean.
func at(object map[string]json.RawMessage, path fieldPath) string {
	raw := object[path[0]]
	for _, name := range path[1:] {
		var inner map[string]json.RawMessage
		if len(raw) == 0 || raw[0] != '{' || json.Unmarshal(raw, &inner) != nil {
			return ""
		}
		raw = inner[name]
	}
	switch {
	case len(raw) == 0 || raw[0] == '{' || raw[0] == '[' || string(raw) == "null":
		return ""
	case raw[0] != '"':
		return string(raw)
	}
	var text string
	if json.Unmarshal(raw, &text) != nil {
		return ""
	}
	return said(text)
}

func joined(paths []fieldPath) string {
	names := make([]string, len(paths))
	for i, path := range paths {
		names[i] = strings.Join(path, ".")
	}
	return strings.Join(names, ", ")
}
