package main

import (
	_ "embed"
	"path"
	"regexp"
	"slices"
	"strings"
)

// phraseText lists unclear phrases, one a line: words, each of which may be several with a slash between.
//
//go:embed phrases.txt
var phraseText string

// A word is a word of a comment or of a page. An empty one ends a sentence.
type word struct {
	text string
	line int
}

// countPhrases counts unclear phrases for 1,000 words: in the comments of the core, in all comments, and in pages.
func countPhrases(n numbers, t *tree) {
	phrases := readPhrases(phraseText)
	count := map[string]int{}
	for i := range t.files {
		f := &t.files[i]
		list := wordsOf(t, f)
		if len(list) == 0 {
			continue
		}
		names := []string{"phrases/comments"}
		if path.Ext(f.path) == ".md" {
			names = []string{"phrases/pages"}
		} else if f.isCore() && !f.isTest() {
			names = append(names, "phrases/core")
		}
		found := phrases.in(list)
		for _, name := range names {
			for _, w := range list {
				if w.text != "" {
					count[name]++
				}
			}
			for _, w := range found {
				n.add(name, item{file: f.path, line: w.line, text: w.text, size: 1})
			}
		}
	}
	for name, words := range count {
		of := n.define(name)
		of.value = float64(int(of.value*10000/float64(words)+0.5)) / 10 // to one digit
	}
}

// wordsOf returns the words of the comments of a file, or of a page without its code. Generated code has none.
func wordsOf(t *tree, f *file) (list []word) {
	switch {
	case f.isGo() && !f.generated:
		for _, group := range f.ast.Comments {
			for _, comment := range group.List {
				if !isDirective(comment.Text) {
					list = appendWords(list, strings.Trim(comment.Text, "/*"), t.line(comment.Pos()))
				}
			}
			list = append(list, word{})
		}
	case path.Ext(f.path) == ".sql" && !t.hasTemplate(f), strings.HasSuffix(f.path, ".sql.tmpl"):
		for i, line := range strings.Split(f.text, "\n") {
			if comment, ok := strings.CutPrefix(strings.TrimSpace(line), "--"); ok {
				list = appendWords(list, comment, i+1)
			} else {
				list = append(list, word{})
			}
		}
	case path.Ext(f.path) == ".md":
		code := false
		for i, line := range strings.Split(f.text, "\n") {
			switch {
			case strings.HasPrefix(strings.TrimSpace(line), "```"):
				code = !code
			case !code:
				list = appendWords(list, line, i+1)
			}
		}
	}
	return list
}

// hasTemplate reports whether a SQL file was written from a template, which has the same comments.
func (t *tree) hasTemplate(f *file) bool {
	template := path.Join(f.dir(), "tmpl", path.Base(f.path)+".tmpl")
	return slices.ContainsFunc(t.files, func(other file) bool { return other.path == template })
}

func isDirective(comment string) bool {
	return regexp.MustCompile(`^//[a-z]+:?[a-z]`).MatchString(comment)
}

var (
	inlineCode = regexp.MustCompile("`[^`]*`|\\]\\([^)]*\\)")
	wordOrStop = regexp.MustCompile(`[A-Za-z]+|[.;:!?|]`)
)

// appendWords appends the words of a line. Code between backquotes is one word; an empty line ends a sentence.
func appendWords(list []word, line string, number int) []word {
	found := wordOrStop.FindAllString(inlineCode.ReplaceAllString(line, " code "), -1)
	if strings.TrimSpace(line) == "" {
		return append(list, word{})
	}
	for _, text := range found {
		if strings.ContainsAny(text, ".;:!?|") {
			list = append(list, word{})
			continue
		}
		list = append(list, word{strings.ToLower(text), number})
	}
	return list
}

// phrases are lists of words, by the first word. Each place of a phrase has the words that fit there.
type phrases map[string][][][]string

func readPhrases(text string) phrases {
	p := phrases{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		var places [][]string
		for _, field := range fields {
			places = append(places, strings.Split(field, "/"))
		}
		for _, first := range places[0] {
			p[first] = append(p[first], places)
		}
	}
	return p
}

// in returns the phrases among the words, each as one word with the line on which it begins. They do not overlap; if several begin
// with the same word, the first of the list counts.
func (p phrases) in(list []word) (found []word) {
	for i := 0; i < len(list); i++ {
		for _, phrase := range p[list[i].text] {
			if fits(phrase, list[i:]) {
				var texts []string
				for _, w := range list[i : i+len(phrase)] {
					texts = append(texts, w.text)
				}
				found = append(found, word{strings.Join(texts, " "), list[i].line})
				i += len(phrase) - 1
				break
			}
		}
	}
	return found
}

func fits(phrase [][]string, list []word) bool {
	if len(phrase) > len(list) {
		return false
	}
	for i, place := range phrase {
		if !slices.Contains(place, list[i].text) {
			return false
		}
	}
	return true
}
