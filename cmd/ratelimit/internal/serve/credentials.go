package serve

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"log/slog"
	"slices"
	"time"
)

// rereadEvery is the time between two looks at the files of the credentials.
const rereadEvery = 10 * time.Second

// Credentials are secrets that operators replace while a server runs.
type Credentials struct {
	// Tokens are accepted as bearer tokens, and as the password of a browser. Without any, every caller is accepted.
	Tokens []string
	// Certificate is the certificate of both servers; nil: plain text.
	Certificate *tls.Certificate
}

// secrets are the credentials in use.
type secrets struct {
	tokens      [][sha256.Size]byte
	certificate *tls.Certificate
}

func secretsOf(c Credentials) *secrets {
	s := &secrets{certificate: c.Certificate}
	for _, token := range c.Tokens {
		s.tokens = append(s.tokens, sha256.Sum256([]byte(token)))
	}
	return s
}

// equal reports whether both are the same.
func (s *secrets) equal(o *secrets) bool {
	if s.certificate == nil || o.certificate == nil {
		return s.certificate == o.certificate && slices.Equal(s.tokens, o.tokens)
	}
	return slices.Equal(s.tokens, o.tokens) && slices.EqualFunc(s.certificate.Certificate, o.certificate.Certificate,
		slices.Equal)
}

// isToken reports whether a text is one of the tokens, in a time that does not depend on it.
func (s *Server) isToken(text string) bool {
	tokens := s.secrets.Load().tokens
	sum, is := sha256.Sum256([]byte(text)), 0
	for i := range tokens {
		is |= subtle.ConstantTimeCompare(sum[:], tokens[i][:])
	}
	return is == 1 || len(tokens) == 0
}

// tls returns the settings of both servers; nil: plain text.
func (s *Server) tls() *tls.Config {
	if s.secrets.Load().certificate == nil {
		return nil
	}
	return &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.secrets.Load().certificate, nil },
		MinVersion:     tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
	}
}

// reread reads the credentials anew. Connections keep the certificate that they have.
func (s *Server) reread(ctx context.Context) {
	if s.config.Reread == nil {
		return
	}
	read, err := s.config.Reread()
	if err != nil {
		s.config.Logger.WarnContext(ctx, "serve: the tokens and the certificate stay as they are",
			slog.String("error", err.Error()))
		return
	}
	if next := secretsOf(read); !next.equal(s.secrets.Load()) {
		s.secrets.Store(next)
		s.config.Logger.InfoContext(ctx, "serve: read other tokens or another certificate",
			slog.Int("tokens", len(next.tokens)))
	}
}
