package playground

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
)

// What the page names of its other files, each once.
const (
	styleLink  = `<link rel="stylesheet" href="style.css">`
	scriptLink = `<script type="module" src="main.js"></script>`
	charset    = `<meta charset="utf-8">`
)

// WriteHTML writes the page as one file that needs no other, to be hosted anywhere or opened from a disk. The file
// carries its own Content-Security-Policy, which lets it run its script and nothing else, and open no connection. It
// returns the error of the writer.
func WriteHTML(w io.Writer) error {
	text, err := export(read())
	if err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}

// export returns the page with its style and its modules in it.
func export(files map[string][]byte) ([]byte, error) {
	script, err := bundle(files, "main.js")
	if err != nil {
		return nil, err
	}
	style := files["style.css"]
	policy := fmt.Sprintf("default-src 'none'; script-src '%s'; style-src '%s'; img-src data:; base-uri 'none'; "+
		"form-action 'none'",
		hashOf(script), hashOf(style))
	page := files[index]
	for _, part := range []struct{ old, begin, text, end string }{
		{charset, charset + "\n" + `<meta http-equiv="Content-Security-Policy" content="`, policy, `">`},
		{styleLink, "<style>", string(style), "</style>"},
		{scriptLink, `<script type="module">`, string(script), "</script>"},
	} {
		if n := bytes.Count(page, []byte(part.old)); n != 1 {
			return nil, fmt.Errorf("playground: %s has %s %d times; it must be there once", index, part.old, n)
		}
		page = bytes.Replace(page, []byte(part.old), []byte(part.begin+part.text+part.end), 1)
	}
	return page, nil
}

// hashOf names a text in a Content-Security-Policy.
func hashOf(text []byte) string {
	sum := sha256.Sum256(text)
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}
